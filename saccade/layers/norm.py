"""LayerNorm that stays in the dtype it is given, over the channels of lists and of maps."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.kernels import allowed, suits
from saccade.kernels import layer_norm as kernels
from saccade.layers.batch_norm import heard

WIDEST = 2048  # channels


class TokenNorm(nn.LayerNorm):
    """LayerNorm over the last axis."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__(dim, eps=eps)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (…, D) -> tokens (…, D)."""
        return layer_norm(tokens, self.weight, self.bias, self.eps)


class ChannelNorm(TokenNorm):
    """LayerNorm over the channels of a map; on a channels-last map both permutes are views."""

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> features (B, C, H, W)."""
        if not torch.jit.is_scripting():  # noqa: SIM102 (TorchScript skips the branch only when it stands alone)
            if fits_map(features):
                return kernels.channel_norm(features, self.weight, self.bias, self.eps)
        return layer_norm(features.permute(0, 2, 3, 1), self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


@torch.jit.ignore
def fits_map(features: Tensor) -> bool:
    """Whether the kernel takes a map as it is: its channels last in memory, and not too many."""
    known = isinstance(features, Tensor) and suits(features) and fused_here()
    return known and features.shape[1] <= WIDEST and features.is_contiguous(memory_format=torch.channels_last)


def add_norm(pixels: Tensor, more: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """pixels + more, and norm(…) of that: all (B, H, W, C), the norm one of maps (B, C, H, W)."""
    if more is not None and pixels.dtype == more.dtype and adds_inside(pixels, norm):
        return kernels.add_norm(pixels, more, norm.weight, norm.bias, norm.eps)
    pixels = pixels if more is None else pixels + more
    return pixels, norm(pixels.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def bias_norm(pixels: Tensor, bias: Tensor, norm: TokenNorm) -> Tensor:
    """norm(pixels + bias), pixels (B, H, W, C), bias (C); to be asked for where `adds_inside` says so."""
    return kernels.bias_norm(pixels, bias, norm.weight, norm.bias, norm.eps)


def adds_inside(pixels: Tensor, norm: nn.Module) -> bool:
    """Whether the kernel takes a sum along: in inference, by a norm that nobody listens to."""
    if torch.is_grad_enabled() or type(norm) is not ChannelNorm or heard((norm,)):
        return False
    return suits(pixels) and allowed("layer_norm") and pixels.shape[-1] <= WIDEST and pixels.is_contiguous()


def fused_here() -> bool:
    """Whether the kernel is to be taken: not by compilers for what learns, where they make one pass of sum and norm,
    there and back.
    """
    return allowed("layer_norm") and not (torch.compiler.is_compiling() and torch.is_grad_enabled())


def layer_norm(tokens: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm in the dtype of its input.

    Its statistics are float32 inside the library's kernel anyway; autocast would nevertheless hand a float32 copy of
    the map to every reader, which casts it again.
    """
    if not torch.jit.is_scripting():  # noqa: SIM102 (TorchScript skips the branch only when it stands alone)
        if suits(tokens) and fused_here() and tokens.is_contiguous() and tokens.shape[-1] <= WIDEST:
            return kernels.layer_norm(tokens, weight, bias, eps)
    low = tokens.dtype == torch.bfloat16 or tokens.dtype == torch.float16
    if low and not torch.jit.is_scripting():
        with torch.autocast(tokens.device.type, enabled=False):
            return F.layer_norm(tokens, weight.shape, weight.to(tokens.dtype), bias.to(tokens.dtype), eps)
    return F.layer_norm(tokens, weight.shape, weight, bias, eps)
