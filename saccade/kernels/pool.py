"""The end of a stem in one pass: batch norm or bias, 3x3 max pooling of stride 2, ReLU, pixels normalised.

The map in front of the pooling is the largest of the whole model; the library goes over it once for the bias or the
norm, once for the ReLU, once to pool it, and twice more over what is left. Here it is read once. For inference.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels import HAS_TRITON
from saccade.kernels.launch import start
from saccade.kernels.norm_relu import Norm

WIDEST = 512  # channels


class PixelNorm(NamedTuple):
    """Every pixel normalised over its channels, then multiplied."""

    eps: float
    scale: float = 1.0


def pool_relu_twin(features: Tensor, norm: Norm, pixels: PixelNorm | None = None) -> Tensor:
    """features (B, C, H, W) -> (B, C, H/2, W/2)."""
    pooled = F.relu(F.max_pool2d(norm.apply(features), 3, stride=2, padding=1))
    if pixels is None:
        return pooled
    normed = F.layer_norm(pooled.permute(0, 2, 3, 1), (pooled.shape[1],), eps=pixels.eps) * pixels.scale
    return normed.permute(0, 3, 1, 2)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from saccade.kernels.norm_relu import _affine, _pointers

    @triton.jit
    def _pool_kernel(
        x_pointer, w_pointer, b_pointer, m_pointer, v_pointer, y_pointer,
        height, width, out_height, out_width, channels, eps, pixel_eps, pixel_scale,
        NORM: tl.constexpr, PIXELS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        image, row = tl.program_id(0) // out_height, tl.program_id(0) % out_height
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
        channel = tl.arange(0, CHANNELS)[None, :]
        held = channel < channels
        gain, shift = _affine(w_pointer, b_pointer, m_pointer, v_pointer, channel, held, eps, NORM)
        x_pointer += image.to(tl.int64) * height * width * channels
        best = tl.full((COLUMNS, CHANNELS), float("-inf"), tl.float32)
        for i in tl.static_range(3):
            for j in tl.static_range(3):
                down, right = 2 * row + i - 1 + tl.zeros_like(column), 2 * column + j - 1
                there = (down >= 0) & (down < height) & (right >= 0) & (right < width) & held
                x = tl.load(x_pointer + (down * width + right) * channels + channel, mask=there, other=0.0)
                best = tl.maximum(best, tl.where(there, x.to(tl.float32) * gain + shift, float("-inf")))
        y = tl.maximum(best, 0.0)
        if PIXELS:
            y = tl.where(held, y, 0.0)
            y = tl.where(held, y - tl.sum(y, 1)[:, None] / channels, 0.0)
            y *= pixel_scale * tl.rsqrt(tl.sum(y * y, 1) / channels + pixel_eps)[:, None]
        offset = (tl.program_id(0).to(tl.int64) * out_width + column) * channels + channel
        tl.store(y_pointer + offset, y.to(y_pointer.dtype.element_ty), mask=held & (column < out_width))


def pool_relu(features: Tensor, norm: Norm, pixels: PixelNorm | None = None) -> Tensor:
    """features (B, C, H, W) -> (B, C, H/2, W/2), both channels-last in memory; at most `WIDEST` channels."""
    batch, channels, height, width = features.shape
    out_height, out_width = (height + 1) // 2, (width + 1) // 2
    pooled = torch.empty(batch, out_height, out_width, channels, dtype=features.dtype, device=features.device)
    kind, pointers = _pointers(norm, features)
    eps, scale = pixels or (0.0, 1.0)
    wide = max(16, triton.next_power_of_2(channels))
    columns = max(1, min(2048 // wide, triton.next_power_of_2(out_width)))
    start(
        _pool_kernel, (batch * out_height, triton.cdiv(out_width, columns)), features, *pointers, pooled,
        height, width, out_height, out_width, channels, norm.eps, eps, scale, NORM=kind, PIXELS=pixels is not None,
        COLUMNS=columns, CHANNELS=wide,
    )  # fmt: skip
    return pooled.permute(0, 3, 1, 2)
