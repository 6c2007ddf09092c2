"""The feed-forward part of a block, with or without a depth-wise convolution inside."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.kernels import HALVES, onednn, suits
from saccade.kernels.depthwise import depthwise
from saccade.kernels.feed_forward import Norm, feed_forward
from saccade.layers.batch_norm import heard
from saccade.layers.depthwise import DepthwiseConv
from saccade.layers.linear import Linear, fits_gelu, in_use, linear_gelu
from saccade.layers.norm import TokenNorm


class TokenMlp(nn.Module):
    """Widen, GELU, narrow again: the plain perceptron of a list of vectors."""

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.fc1 = Linear(dim, hidden_dim)
        self.fc2 = Linear(hidden_dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, M, D) -> tokens (B, M, D)."""
        if torch.jit.is_scripting():
            return self.fc2(F.gelu(self.fc1(tokens)))
        else:
            return self.fc2(linear_gelu(self.fc1, tokens))


class ConvMlp(nn.Module):
    """Widen, look at the 3x3 neighbourhood of every hidden channel, narrow again.

    SViT activates before the depth-wise convolution, PaCa after it (`act_first`). `conv=False` is the plain
    two-layer perceptron, `shortcut=False` drops the sum around the convolution, `sub_norm` normalises the hidden layer
    before it is narrowed (Sub-LN, arXiv 2210.06423).
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        act_first: bool = True,
        conv: bool = True,
        shortcut: bool = True,
        drop: float = 0.0,
        sub_norm: bool = False,
    ):
        super().__init__()
        self.fc1 = Linear(dim, hidden_dim)
        self.act_outside = (act_first and drop > 0) or not conv  # dropout comes between the activation and the conv
        act = "" if self.act_outside else "pre" if act_first else "post"
        self.conv = DepthwiseConv(hidden_dim, act, shortcut) if conv else nn.Identity()
        self.drop1 = nn.Dropout(drop)
        self.norm = TokenNorm(hidden_dim) if sub_norm else nn.Identity()
        self.fc2 = Linear(hidden_dim, dim)
        self.drop2 = nn.Dropout(drop)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> features (B, C, H, W); channels-last in memory, so every permute is a view."""
        if not torch.jit.is_scripting():
            if onednn.suits(features) and self.plain():
                return self.by_onednn(features)
            if self.gelu_fits(features):
                return self.with_gelu_inside(features)
            if self.learns_whole(features):
                return self.drop2(self.by_one_function(features))
        hidden = self.fc1(features.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # (B, hidden, H, W)
        if self.act_outside:
            hidden = self.conv(self.drop1(F.gelu(hidden)))
        else:
            hidden = self.drop1(self.conv(hidden))
        return self.drop2(self.fc2(self.norm(hidden.permute(0, 2, 3, 1)))).permute(0, 3, 1, 2)

    @torch.jit.ignore
    def plain(self) -> bool:
        """Whether the three layers are what this class made, and nobody listens to them."""
        parts = (self.fc1, self.conv, self.fc2)
        untouched = [type(part) for part in parts] == [Linear, DepthwiseConv, Linear]
        return untouched and not heard(parts) and not self.training and isinstance(self.norm, nn.Identity)

    @torch.jit.ignore
    def gelu_fits(self, features: Tensor) -> bool:
        """Whether the first layer's product may take the GELU that stands before the convolution along."""
        if torch.is_grad_enabled() or not isinstance(features, Tensor):
            return False
        first = isinstance(self.conv, DepthwiseConv) and self.conv.act == "pre"
        return first and self.plain() and fits_gelu(self.fc1, features.permute(0, 2, 3, 1))

    @torch.jit.ignore
    def with_gelu_inside(self, features: Tensor) -> Tensor:
        hidden = linear_gelu(self.fc1, features.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # (B, hidden, H, W)
        hidden = depthwise(hidden, self.conv.weight, self.conv.bias, "", self.conv.shortcut)
        return self.fc2(hidden.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    @torch.jit.ignore
    def learns_whole(self, features: Tensor) -> bool:
        """Whether all three layers learn in half precision on a GPU, in eager mode, and may do so as one function."""
        if not torch.is_grad_enabled() or not isinstance(features, Tensor) or torch.compiler.is_compiling():
            return False
        if self.act_outside or not suits(features) or in_use(features) not in HALVES:
            return False
        first, conv, last, drop, norm = self.fc1, self.conv, self.fc2, self.drop1, self.norm
        if type(first) is not Linear or type(conv) is not DepthwiseConv or type(last) is not Linear:
            return False
        if heard((first, conv, last, drop, norm)) or not isinstance(norm, nn.Identity) or (drop.p and drop.training):
            return False
        for layer in (first, conv, last):
            if layer.bias is None or not layer.weight.requires_grad or not layer.bias.requires_grad:
                return False
        return features.is_contiguous(memory_format=torch.channels_last)

    @torch.jit.ignore
    def by_one_function(
        self, features: Tensor, norm: Norm | None = None, normed: tuple[Tensor | None, Tensor | None] = (None, None)
    ) -> Tensor:
        """All three layers, and the norm before them if there is one, with its weight and bias."""
        layers = [(part.weight, part.bias) for part in (self.fc1, self.conv, self.fc2)]
        return feed_forward(features, *layers, self.conv.act, self.conv.shortcut, in_use(features), norm, normed)

    def forward_with_norm(self, features: Tensor, norm: Norm, weight: Tensor, bias: Tensor) -> Tensor | None:
        """self(norm(features)) as one autograd function, or None where that is not supported; for `ops.prenorm`."""
        if not self.learns_whole(features):
            return None
        return self.drop2(self.by_one_function(features, norm, (weight, bias)))

    @torch.jit.ignore
    def by_onednn(self, features: Tensor) -> Tensor:
        layers = [(part.weight, part.bias) for part in (self.fc1, self.conv, self.fc2)]
        return onednn.conv_mlp(features, *layers, act_first=self.conv.act == "pre", shortcut=self.conv.shortcut)
