"""ResNet's small change in one pass: batch norm with fixed statistics, the sum with the shortcut (normed too), ReLU.

The library makes a pass over the map of each: after a 3x3 convolution two, at the end of a block four. In place: the
map is the fresh output of a convolution that nobody else reads. For inference; a compiler fuses these steps by itself.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels import HAS_TRITON
from saccade.kernels.launch import Launch, planned


class Norm(NamedTuple):
    """A batch norm's numbers, (C,) each; or a gain and a shift; or, of a norm folded away, the bias alone."""

    bias: Tensor
    weight: Tensor | None = None
    mean: Tensor | None = None
    variance: Tensor | None = None
    eps: float = 0.0

    def apply(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> (B, C, H, W), by the library."""
        if self.mean is None or self.variance is None:
            if self.weight is not None:
                features = features * self.weight.to(features.dtype).view(-1, 1, 1)
            return features + self.bias.to(features.dtype).view(-1, 1, 1)
        return F.batch_norm(features, self.mean, self.variance, self.weight, self.bias, eps=self.eps)


def norm_relu_twin(features: Tensor, norm: Norm, shortcut: Tensor | None = None, other: Norm | None = None) -> Tensor:
    """relu(norm(features) + other(shortcut)), all (B, C, H, W)."""
    total = norm.apply(features)
    if shortcut is not None:
        total = total + (shortcut if other is None else other.apply(shortcut))
    return F.relu(total)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from saccade.kernels.rows import cut, place

    @triton.jit
    def _affine(w_pointer, b_pointer, m_pointer, v_pointer, channel, held, eps, NORM: tl.constexpr):
        """Gain and shift of every channel: of a bias (1), a whole norm (2), themselves (3), of nothing (0)."""
        shift = tl.zeros_like(channel).to(tl.float32)
        gain = shift + 1.0
        if NORM > 0:
            shift = tl.load(b_pointer + channel, mask=held, other=0.0).to(tl.float32)
        if NORM == 2:
            gain = tl.rsqrt(tl.load(v_pointer + channel, mask=held, other=1.0).to(tl.float32) + eps)
            gain *= tl.load(w_pointer + channel, mask=held, other=0.0).to(tl.float32)
            shift -= tl.load(m_pointer + channel, mask=held, other=0.0).to(tl.float32) * gain
        if NORM == 3:
            gain = tl.load(w_pointer + channel, mask=held, other=0.0).to(tl.float32)
        return gain, shift

    @triton.jit
    def _kernel(
        x_pointer, w_pointer, b_pointer, m_pointer, v_pointer,
        s_pointer, sw_pointer, sb_pointer, sm_pointer, sv_pointer, rows, channels, eps, s_eps,
        NORM: tl.constexpr, SHORTCUT: tl.constexpr, OTHER: tl.constexpr,
        ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        channel, held, offset, mask = place(rows, channels, ROWS, CHANNELS)
        x = tl.load(x_pointer + offset, mask=mask, other=0.0).to(tl.float32)
        gain, shift = _affine(w_pointer, b_pointer, m_pointer, v_pointer, channel, held, eps, NORM)
        x = x * gain + shift
        if SHORTCUT:
            s = tl.load(s_pointer + offset, mask=mask, other=0.0).to(tl.float32)
            gain, shift = _affine(sw_pointer, sb_pointer, sm_pointer, sv_pointer, channel, held, s_eps, OTHER)
            x += s * gain + shift
        x = tl.where(x < 0, 0.0, x)  # unlike a maximum, lets NaN through
        tl.store(x_pointer + offset, x.to(x_pointer.dtype.element_ty), mask=mask)

    def _pointers(norm: Norm | None, like: Tensor) -> tuple[int, tuple[Tensor, ...]]:
        """What kind of norm it is, and its weight, bias, mean and variance; something else where there is none."""
        if norm is None:
            return 0, (like, like, like, like)
        bias, weight, mean, variance, _ = norm
        if mean is not None and variance is not None:
            return 2, (bias if weight is None else weight, bias, mean, variance)
        return (1, (bias, bias, bias, bias)) if weight is None else (3, (weight, bias, bias, bias))

    @planned
    def _plan(rows: int, channels: int, eps: float, other_eps: float, kind: int, shortcut: bool, other: int) -> Launch:
        grid, tile = cut(rows, channels)
        switches = dict(NORM=kind, SHORTCUT=shortcut, OTHER=other)
        return Launch(_kernel, grid, rows, channels, eps, other_eps, **switches, **tile)


def norm_relu(features: Tensor, norm: Norm, shortcut: Tensor | None = None, other: Norm | None = None) -> Tensor:
    """relu(norm(features) + other(shortcut)), written over `features`; (B, C, H, W), channels-last in memory."""
    channels = features.shape[1]
    kind, pointers = _pointers(norm, features)
    other_kind, other_pointers = _pointers(other, features)
    eps, added = (norm.eps, 0.0 if other is None else other.eps), shortcut is not None
    start = _plan(features.numel() // channels, channels, *eps, kind, added, other_kind)
    start(features, *pointers, features if shortcut is None else shortcut, *other_pointers)
    return features


def fits(features: Tensor) -> bool:
    return features.is_contiguous(memory_format=torch.channels_last)
