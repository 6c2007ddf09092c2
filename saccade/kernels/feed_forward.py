"""The feed-forward part of a block that learns, in eager runs: both linear layers and the convolution between them.

The steps are those of `linear` and `depthwise`, one after the other. As three functions of autograd's they cost the
host, for which a GPU waits, half as much again: every function keeps its books, and every map is seen as rows and as
a map again, there and back. Its twin is those three, as `ConvMlp` has them. Compilers keep no such books.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels import depthwise, in_type
from saccade.kernels.linear import column_sum, weight_gradient, without_autocast


class _FeedForward(torch.autograd.Function):
    """Of maps (B, C, H, W), channels-last. Between the layers everything is rows (B H W, D)."""

    @staticmethod
    def forward(
        ctx, features: Tensor, weight1: Tensor, bias1: Tensor, taps: Tensor, shift: Tensor, weight2: Tensor,
        bias2: Tensor, act: int, shortcut: bool, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        batch, channels, height, width = features.shape
        ctx.sizes, ctx.how = (batch, height, width), (act, shortcut)
        ctx.dtypes = features.dtype, weight1.dtype, bias1.dtype, weight2.dtype, bias2.dtype
        rows = in_type(features, dtype).permute(0, 2, 3, 1).reshape(-1, channels)
        weight1, weight2 = in_type(weight1, dtype), in_type(weight2, dtype)
        hidden = F.linear(rows, weight1, in_type(bias1, dtype))
        seen = depthwise._convolve((*ctx.sizes, hidden.shape[1]), hidden, taps, shift, act, shortcut)
        ctx.save_for_backward(rows, weight1, hidden, taps, shift, seen, weight2)
        return _as_map(F.linear(seen, weight2, in_type(bias2, dtype)), ctx.sizes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    @without_autocast
    def backward(ctx, g: Tensor):
        rows, weight1, hidden, taps, shift, seen, weight2 = ctx.saved_tensors
        to_x, to_weight1, to_bias1, to_weight2, to_bias2 = ctx.dtypes
        g = g.permute(0, 2, 3, 1).reshape(-1, g.shape[1])
        last = weight_gradient(g, seen, to_weight2), in_type(column_sum(g), to_bias2)
        g = torch.mm(g, weight2)
        g, *middle = depthwise._differentiate((*ctx.sizes, hidden.shape[1]), g, hidden, taps, shift, *ctx.how)
        first = weight_gradient(g, rows, to_weight1), in_type(column_sum(g), to_bias1)
        g_x = in_type(_as_map(torch.mm(g, weight1), ctx.sizes), to_x) if ctx.needs_input_grad[0] else None
        return g_x, *first, *middle, *last, None, None, None


def _as_map(rows: Tensor, sizes: tuple[int, int, int]) -> Tensor:
    """rows (B H W, C) -> (B, C, H, W), channels-last."""
    return rows.view(*sizes, rows.shape[1]).permute(0, 3, 1, 2)


def feed_forward(
    features: Tensor, first: tuple[Tensor, Tensor], conv: tuple[Tensor, Tensor], last: tuple[Tensor, Tensor],
    act: str, shortcut: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """features (B, C, H, W), channels-last -> (B, C, H, W), computed in `dtype`; of each step weight and bias."""
    return _FeedForward.apply(features, *first, *conv, *last, depthwise.ACTS[act], shortcut, dtype)
