"""LayerNorm over channels, alone or with the sum before it.

PyTorch's LayerNorm gives every row its own thread block, which is right for the long rows of language models. Here rows
are the 32 to 1024 channels of a pixel, and there are hundreds of thousands of them: a program takes many rows. Weights
are read in the dtype in which they are stored. Backward computes the gradient of the input and partial sums for weight
and bias in one pass.
"""

from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.ops import _dispatch as dispatch
from saccade.ops._dispatch import FusedOp, register_op
from saccade.ops._launch import HAS_TRITON, Kernel, cdiv, jit, next_power_of_2, variant
from saccade.ops._rows import PROGRAMS, column_sum

if HAS_TRITON:
    import triton
    import triton.language as tl

MAX_CHANNELS = 2048


def layer_norm_reference(tokens: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last axis of tokens (..., D), in their dtype; autocast would return float32."""
    if tokens.dtype in dispatch.HALF_DTYPES:
        return plain_norm(tokens, eps, weight.to(tokens.dtype), bias.to(tokens.dtype))
    return plain_norm(tokens, eps, weight, bias)


def plain_norm(tokens: Tensor, eps: float, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """LayerNorm over the last axis of tokens (..., D), in their dtype, which is that of the affine parameters."""
    if tokens.dtype in dispatch.HALF_DTYPES:
        with torch.autocast(tokens.device.type, enabled=False):  # which would return float32
            return F.layer_norm(tokens, tokens.shape[-1:], weight, bias, eps)
    return F.layer_norm(tokens, tokens.shape[-1:], weight, bias, eps)


if HAS_TRITON:

    @triton.jit
    @no_type_check
    def _normed_rows(x, mask, DIM: tl.constexpr, EPS: tl.constexpr):
        """Normalised rows (R, C), zeros outside the mask, and their inverse standard deviations (R, 1)."""
        x = tl.where(mask, x - tl.sum(x, 1)[:, None] / DIM, 0.0)
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + EPS)[:, None]
        return x * scale, scale

    @jit
    def _norm_kernel(
        x_ptr, added_ptr, weight_ptr, bias_ptr, total_ptr, y_ptr, rows,
        DIM: tl.constexpr, EPS: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """y = norm(x + added); with ADD the sum, total, is stored too."""
        row, channel = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, CHANNELS)[None, :]
        offset, mask = row.to(tl.int64)[:, None] * DIM + channel, (row < rows)[:, None] & (channel < DIM)
        x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        if ADD:
            x += tl.load(added_ptr + offset, mask=mask, other=0.0).to(tl.float32)
            x = x.to(total_ptr.dtype.element_ty)  # the norm is that of the rounded sum, as in two steps
            tl.store(total_ptr + offset, x, mask=mask)
            x = x.to(tl.float32)
        y, _ = _normed_rows(x, mask, DIM, EPS)
        y *= tl.load(weight_ptr + channel, mask=channel < DIM, other=0.0).to(tl.float32)
        y += tl.load(bias_ptr + channel, mask=channel < DIM, other=0.0).to(tl.float32)
        tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)

    @jit
    @no_type_check
    def _norm_backward_kernel(
        g_ptr, x_ptr, weight_ptr, g_x_ptr, partial_ptr, rows, step,
        DIM: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """g_x, and this program's sums for the gradients of weight and bias, partial (programs, 2, C)."""
        channel = tl.arange(0, CHANNELS)[None, :]
        weight = tl.load(weight_ptr + channel, mask=channel < DIM, other=0.0).to(tl.float32)
        g_weight = tl.zeros((ROWS, CHANNELS), tl.float32)
        g_bias = tl.zeros((ROWS, CHANNELS), tl.float32)
        for first in range(tl.program_id(0) * ROWS, rows, step):
            row = first + tl.arange(0, ROWS)
            mask = (row < rows)[:, None] & (channel < DIM)
            offset = row.to(tl.int64)[:, None] * DIM + channel
            g = tl.load(g_ptr + offset, mask=mask, other=0.0).to(tl.float32)
            x, scale = _normed_rows(tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32), mask, DIM, EPS)
            g_weight += g * x
            g_bias += g
            g = g * weight
            g_x = (g - x * (tl.sum(g * x, 1)[:, None] / DIM) - tl.sum(g, 1)[:, None] / DIM) * scale
            tl.store(g_x_ptr + offset, g_x.to(g_x_ptr.dtype.element_ty), mask=mask)
        target = partial_ptr + tl.program_id(0) * 2 * DIM + channel
        tl.store(target, tl.sum(g_weight, 0)[None, :], mask=channel < DIM)
        tl.store(target + DIM, tl.sum(g_bias, 0)[None, :], mask=channel < DIM)


@variant
def _forward_kernel(dim: int, eps: float, add: bool) -> Kernel:
    """Few threads per long row, so that each thread adds up more of it."""
    channels = next_power_of_2(dim)
    elements, warps = (2048, 4) if channels < 512 else (1024, 2)
    rows = max(1, elements // channels)
    return Kernel(_norm_kernel, DIM=dim, EPS=eps, ADD=add, ROWS=rows, CHANNELS=channels, num_warps=warps)


@variant
def _backward_kernel(dim: int, eps: float) -> Kernel:
    channels = next_power_of_2(dim)
    rows, warps = max(1, 2048 // channels), 8 if channels < 512 else 4
    return Kernel(_norm_backward_kernel, DIM=dim, EPS=eps, ROWS=rows, CHANNELS=channels, num_warps=warps)


# Inputs of these are contiguous, or channels-last features (B, C, H, W): rows of channels in either case. Backward
# recomputes the mean and standard deviation of every row.


def _normalize(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return _launch(x, x, weight, bias, x, eps, False)


def _add_normalize(x: Tensor, update: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = torch.empty_like(x)
    return total, _launch(x, update, weight, bias, total, eps, True)


def _launch(x: Tensor, added: Tensor, weight: Tensor, bias: Tensor, total: Tensor, eps: float, add: bool) -> Tensor:
    y, dim = torch.empty_like(x), weight.shape[0]
    kernel, rows = _forward_kernel(dim, eps, add), x.numel() // dim
    kernel((cdiv(rows, kernel.constants["ROWS"]),), x, added, weight, bias, total, y, rows)
    return y


def _gradients(g: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of x, and of weight and bias (2, C) in float32."""
    g, dim = dispatch.match_layout(g, x), weight.shape[0]
    rows, kernel = x.numel() // dim, _backward_kernel(dim, eps)
    blocks = cdiv(rows, kernel.constants["ROWS"])
    programs = min(PROGRAMS, blocks)
    g_x = torch.empty_like(x)
    partial = torch.empty(programs, 2, dim, dtype=torch.float32, device=x.device)
    kernel((programs,), g, x, weight, g_x, partial, rows, programs * kernel.constants["ROWS"])
    return g_x, column_sum(partial.flatten(1)).view(2, dim)


def _split(g_x: Tensor, g_shared: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    g_weight, g_bias = g_shared.unbind()
    return g_x, dispatch.cast(g_weight, dtype), dispatch.cast(g_bias, dtype)


def _backward(ctx: Any, gradients: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, _ = ctx.saved_tensors
    g_x, g_shared = gradients(g, x, weight, *ctx.options)
    return *_split(g_x, g_shared, weight.dtype), None


_norm = FusedOp("layer_norm", _normalize, _gradients, backward=_backward)
_add_norm = FusedOp("add_norm", _add_normalize)


def _supports_layer_norm(tokens: Tensor, weight: Tensor, bias: Tensor, eps: float) -> bool:
    """In eager mode; under torch.compile Inductor fuses the norm with the sums around it, in both passes."""
    if dispatch.is_compiling() or not dispatch.on_gpu(tokens) or weight.shape[0] > MAX_CHANNELS:
        return False
    return tokens.is_contiguous()


@register_op("layer_norm", reference=layer_norm_reference, supports=_supports_layer_norm)
def layer_norm(tokens: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return _norm(tokens, weight, bias, eps)


# Sums of features (B, C, H, W). Inductor (torch 2.11) writes them in the order of their axes, not of their memory: ten
# times slower for channels-last features, 5.5 ms of a training step of PaCa-S on an H200. Sums of (B, H, W, C) are not.


def add_reference(features: Tensor, update: Tensor) -> Tensor:
    """features + update, both (B, C, H, W)."""
    return features + update


def _supports_add(features: Tensor, update: Tensor) -> bool:
    if not dispatch.is_compiling() or not isinstance(features, Tensor) or not isinstance(update, Tensor):
        return False
    return dispatch.is_channels_last(features) and dispatch.is_channels_last(update)


@register_op("add", reference=add_reference, supports=_supports_add, implementation="channels_last")
def add(features: Tensor, update: Tensor) -> Tensor:
    return (features.permute(0, 2, 3, 1) + update.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def add_norm_reference(features: Tensor, update: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """The sum of features and update (B, C, H, W), and its norm over channels."""
    features = add(features, update)
    return features, norm(features)


def _supports_add_norm(features: Tensor, update: Tensor, norm: nn.Module) -> bool:
    if dispatch.is_training() or not dispatch.on_gpu(features, update):
        return False
    if not getattr(norm, "over_channels", False) or not dispatch.is_plain(norm):
        return False
    same = features.dtype == update.dtype and features.shape == update.shape
    layout = dispatch.is_channels_last(features) and dispatch.is_channels_last(update)
    return same and layout and features.shape[1] <= MAX_CHANNELS


@register_op("add_norm", reference=add_norm_reference, supports=_supports_add_norm)
def add_norm(features: Tensor, update: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    assert isinstance(norm, nn.LayerNorm)
    pixels, more = features.permute(0, 2, 3, 1), update.permute(0, 2, 3, 1)  # contiguous: a layout that Inductor keeps
    total, normed = _add_norm(pixels, more, norm.weight, norm.bias, norm.eps)
    return total.permute(0, 3, 1, 2), normed.permute(0, 3, 1, 2)
