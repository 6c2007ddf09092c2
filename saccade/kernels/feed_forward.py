"""The feed-forward part of a block that learns, in eager runs: its norm, two linear layers, a convolution between them.

The steps are those of `batch_norm` or `layer_norm`, `linear` and `depthwise`, one after the other. As four functions of
autograd's they cost the host, for which a GPU waits, twice as much: every function keeps its books, and every map is
seen as rows and as a map again, there and back. What the norm answers is not kept but computed again. The twin is those
four, as `ConvMlp` and `normed_into` have them. Compilers keep no such books.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels import depthwise, in_type
from saccade.kernels.linear import column_sum, weight_gradient, without_autocast


class Norm(Protocol):
    """A norm of maps (B, C, H, W), channels-last: `Learning` of `batch_norm` or of `layer_norm`."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]: ...

    def recompute(self, x: Tensor, weight: Tensor, bias: Tensor, kept: Tensor) -> Tensor: ...

    def gradients(self, g: Tensor, x: Tensor, weight: Tensor, bias: Tensor, kept: Tensor) -> tuple[Tensor, ...]: ...


class _FeedForward(torch.autograd.Function):
    """Of maps (B, C, H, W), channels-last. Between the layers everything is rows (B H W, D)."""

    @staticmethod
    def forward(
        ctx, features: Tensor, weight0: Tensor | None, bias0: Tensor | None, weight1: Tensor, bias1: Tensor,
        taps: Tensor, shift: Tensor, weight2: Tensor, bias2: Tensor, how: tuple,
    ) -> Tensor:  # fmt: skip
        norm, act, shortcut, dtype = ctx.how = how
        batch, _, height, width = features.shape
        ctx.sizes = batch, height, width
        ctx.dtypes = weight1.dtype, bias1.dtype, weight2.dtype, bias2.dtype
        normed, kept = (features, None) if norm is None else norm.forward(features, weight0, bias0)
        weight1, weight2 = in_type(weight1, dtype), in_type(weight2, dtype)
        hidden = F.linear(_as_rows(in_type(normed, dtype)), weight1, in_type(bias1, dtype))
        seen = depthwise._convolve((*ctx.sizes, hidden.shape[1]), hidden, taps, shift, act, shortcut)
        ctx.save_for_backward(features, weight0, bias0, kept, weight1, hidden, taps, shift, seen, weight2)
        return _as_map(F.linear(seen, weight2, in_type(bias2, dtype)), ctx.sizes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    @without_autocast
    def backward(ctx, g: Tensor):
        features, weight0, bias0, kept, weight1, hidden, taps, shift, seen, weight2 = ctx.saved_tensors
        norm, act, shortcut, dtype = ctx.how
        to_weight1, to_bias1, to_weight2, to_bias2 = ctx.dtypes
        g = _as_rows(g)
        last = weight_gradient(g, seen, to_weight2), in_type(column_sum(g), to_bias2)
        g = torch.mm(g, weight2)
        g, *middle = depthwise._differentiate((*ctx.sizes, hidden.shape[1]), g, hidden, taps, shift, act, shortcut)
        normed = features if norm is None else norm.recompute(features, weight0, bias0, kept)
        first = weight_gradient(g, _as_rows(in_type(normed, dtype)), to_weight1), in_type(column_sum(g), to_bias1)
        if norm is None and not ctx.needs_input_grad[0]:
            return None, None, None, *first, *middle, *last, None
        g = in_type(_as_map(torch.mm(g, weight1), ctx.sizes), features.dtype)
        begin = (g, None, None) if norm is None else norm.gradients(g, features, weight0, bias0, kept)
        return *begin, *first, *middle, *last, None


def _as_rows(features: Tensor) -> Tensor:
    """features (B, C, H, W) -> (B H W, C), a view where they are channels-last."""
    return features.permute(0, 2, 3, 1).reshape(-1, features.shape[1])


def _as_map(rows: Tensor, sizes: tuple[int, int, int]) -> Tensor:
    """rows (B H W, C) -> (B, C, H, W), channels-last."""
    return rows.view(*sizes, rows.shape[1]).permute(0, 3, 1, 2)


def feed_forward(
    features: Tensor, first: tuple[Tensor, Tensor], conv: tuple[Tensor, Tensor], last: tuple[Tensor, Tensor],
    act: str, shortcut: bool, dtype: torch.dtype, norm: Norm | None = None,
    normed: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:  # fmt: skip
    """features (B, C, H, W), channels-last -> (B, C, H, W), computed in `dtype`; of each step weight and bias.

    norm: what stands before them all, with its weight and bias in `normed`.
    """
    how = norm, depthwise.ACTS[act], shortcut, dtype
    return _FeedForward.apply(features, *normed, *first, *conv, *last, how)
