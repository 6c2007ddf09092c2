"""SparseFormer's sampling: regions adjusted, points placed in them, features sampled there and mixed.

`place_points`, `sample` and `sample_and_mix` are three kernels instead of some sixty small operations per block. The
references work on images (x, y) and videos (x, y, t); the kernels on images only.
"""

from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.layers.boxes import adjust, centre_and_size
from saccade.ops import _dispatch as dispatch
from saccade.ops._dispatch import FusedOp, cast, register_op
from saccade.ops._launch import HAS_TRITON, Kernel, cdiv, jit, next_power_of_2, variant
from saccade.ops._rows import PROGRAMS, column_sum

if HAS_TRITON:
    import triton
    import triton.language as tl

    from saccade.ops._gelu import gelu, gelu_derivative

MAX_GROWTH = 8.0  # of a region's side in one step, as a power of e
MIX_CHUNK = 16  # points that `_mix_kernel` samples at a time


# Placing points.


def spread_points(offsets: Tensor, regions: Tensor, scale: float, eps: float) -> Tensor:
    """Points (B, M, P, A) in regions (B, M, 2 A), from offsets (B, M, P, A) (SparseFormer Eq. 3).

    The offsets of a token are centred and divided by three standard deviations, so that most points stay inside.
    """
    centred = offsets - offsets.mean(2, keepdim=True)
    offsets = centred / (3 * (offsets.std(2, keepdim=True) + eps))
    centre, size = centre_and_size(regions)
    return centre.unsqueeze(2) + scale * offsets * size.unsqueeze(2)  # SparseFormer Eq. 3


def place_points_reference(
    regions: Tensor, deltas: Tensor, offsets: Tensor, grid: Tensor, scale: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Adjust regions by deltas (SparseFormer Eqs. 7-8) and place points in them (SparseFormer Eq. 3).

    regions and deltas (B, M, 2 A), offsets (B, M, P A), grid (P A), A axes -> regions (B, M, 2 A), points (B, M, P, A).
    """
    regions = adjust(regions, deltas.to(regions.dtype), MAX_GROWTH)
    offsets = (offsets.to(regions.dtype) + grid).unflatten(2, (-1, regions.shape[2] // 2))
    return regions, spread_points(offsets, regions, scale, eps)


if HAS_TRITON:

    @jit
    def _place_kernel(
        region_ptr, delta_ptr, offset_ptr, grid_ptr, new_region_ptr, point_ptr,
        POINTS: tl.constexpr, SCALE: tl.constexpr, EPS: tl.constexpr, LIMIT: tl.constexpr, P: tl.constexpr,
    ):  # fmt: skip
        """One axis of one token."""
        token, axis = tl.program_id(0).to(tl.int64), tl.program_id(1)
        low, high = tl.load(region_ptr + token * 4 + axis), tl.load(region_ptr + token * 4 + 2 + axis)
        centre, size = (low + high) / 2, tl.abs(high - low)
        shift = tl.load(delta_ptr + token * 4 + axis).to(tl.float32)
        growth = tl.load(delta_ptr + token * 4 + 2 + axis).to(tl.float32)
        centre += shift * size
        size *= tl.exp(tl.minimum(tl.maximum(growth, -LIMIT), LIMIT))
        low, high = centre - size / 2, centre + size / 2
        tl.store(new_region_ptr + token * 4 + axis, low)
        tl.store(new_region_ptr + token * 4 + 2 + axis, high)
        centre, size = (low + high) / 2, high - low
        p = tl.arange(0, P)
        mask = p < POINTS
        offset = tl.load(offset_ptr + (token * POINTS + p) * 2 + axis, mask=mask, other=0.0).to(tl.float32)
        offset += tl.load(grid_ptr + p * 2 + axis, mask=mask, other=0.0).to(tl.float32)
        offset = tl.where(mask, offset - tl.sum(tl.where(mask, offset, 0.0), 0) / POINTS, 0.0)
        spread = 3 * (tl.sqrt(tl.sum(offset * offset, 0) / (POINTS - 1)) + EPS)
        tl.store(point_ptr + (token * POINTS + p) * 2 + axis, centre + SCALE * (offset / spread) * size, mask=mask)

    @jit
    def _place_backward_kernel(
        g_region_ptr, g_point_ptr, region_ptr, delta_ptr, offset_ptr, grid_ptr, g_old_region_ptr, g_delta_ptr,
        g_offset_ptr, g_grid_ptr, tokens,
        POINTS: tl.constexpr, SCALE: tl.constexpr, EPS: tl.constexpr, LIMIT: tl.constexpr, P: tl.constexpr,
    ):  # fmt: skip
        """One axis of some tokens; the gradient of the grid is summed over the program's tokens."""
        axis, p = tl.program_id(1), tl.arange(0, P)
        mask = p < POINTS
        grid = tl.load(grid_ptr + p * 2 + axis, mask=mask, other=0.0).to(tl.float32)
        g_grid = tl.zeros((P,), tl.float32)
        for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
            corner = token * 4 + axis
            at = (token * POINTS + p) * 2 + axis
            signed = tl.load(region_ptr + corner + 2) - tl.load(region_ptr + corner)
            size = tl.abs(signed)
            shift = tl.load(delta_ptr + corner).to(tl.float32)
            growth = tl.load(delta_ptr + corner + 2).to(tl.float32)
            factor = tl.exp(tl.minimum(tl.maximum(growth, -LIMIT), LIMIT))
            offset = tl.load(offset_ptr + at, mask=mask, other=0.0).to(tl.float32) + grid
            offset = tl.where(mask, offset - tl.sum(tl.where(mask, offset, 0.0), 0) / POINTS, 0.0)
            deviation = tl.sqrt(tl.sum(offset * offset, 0) / (POINTS - 1))
            spread = 3 * (deviation + EPS)
            g = tl.load(g_point_ptr + at, mask=mask, other=0.0)
            g_low, g_high = tl.load(g_region_ptr + corner), tl.load(g_region_ptr + corner + 2)
            along = tl.sum(g * offset, 0) * SCALE / spread  # gradient of the new size through the points
            g_centre = g_low + g_high + tl.sum(g, 0)
            g_new_size = (g_high - g_low) / 2 + along
            sign = tl.where(signed > 0, 1.0, tl.where(signed < 0, -1.0, 0.0))
            g_size = (g_centre * shift + g_new_size * factor) * sign  # of the signed size
            tl.store(g_delta_ptr + corner, (g_centre * size).to(g_delta_ptr.dtype.element_ty))
            free = (growth >= -LIMIT) & (growth <= LIMIT)
            g_growth = tl.where(free, g_new_size * factor * size, 0.0)
            tl.store(g_delta_ptr + corner + 2, g_growth.to(g_delta_ptr.dtype.element_ty))
            tl.store(g_old_region_ptr + corner, g_centre / 2 - g_size)
            tl.store(g_old_region_ptr + corner + 2, g_centre / 2 + g_size)
            g = g * (SCALE * size * factor / spread)
            g = tl.where(mask, g - tl.sum(g, 0) / POINTS, 0.0)
            g_spread = 3 * along * size * factor / (spread * (POINTS - 1))
            g -= g_spread * offset / tl.where(deviation > 0, deviation, 1.0)  # equal offsets are all zero
            tl.store(g_offset_ptr + at, g.to(g_offset_ptr.dtype.element_ty), mask=mask)
            g_grid += g
        tl.store(g_grid_ptr + (tl.program_id(0) * POINTS + p) * 2 + axis, g_grid, mask=mask)


@variant
def _place_variant(backward: bool, points: int, scale: float, eps: float) -> Kernel:
    constants = dict(POINTS=points, SCALE=scale, EPS=eps, LIMIT=MAX_GROWTH, P=_block(points))
    if backward:
        return Kernel(_place_backward_kernel, **constants, num_warps=1)
    return Kernel(_place_kernel, **constants)


def _place(
    regions: Tensor, deltas: Tensor, offsets: Tensor, grid: Tensor, scale: float, eps: float
) -> tuple[Tensor, Tensor]:
    regions, deltas, offsets = regions.contiguous(), deltas.contiguous(), offsets.contiguous()
    batch, tokens, _ = regions.shape
    new_regions = torch.empty_like(regions)
    points = torch.empty(batch, tokens, grid.numel() // 2, 2, dtype=regions.dtype, device=regions.device)
    kernel = _place_variant(False, grid.numel() // 2, scale, eps)
    kernel((batch * tokens, 2), regions, deltas, offsets, grid.contiguous(), new_regions, points)
    return new_regions, points


def _place_gradients(
    g_regions: Tensor, g_points: Tensor, regions: Tensor, deltas: Tensor, offsets: Tensor, grid: Tensor, scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of regions, deltas, offsets and grid."""
    regions, deltas, offsets = regions.contiguous(), deltas.contiguous(), offsets.contiguous()
    tokens = regions.shape[0] * regions.shape[1]
    programs = min(PROGRAMS, tokens)
    results = torch.empty_like(regions), torch.empty_like(deltas), torch.empty_like(offsets)
    partial = torch.empty(programs, grid.numel(), dtype=torch.float32, device=grid.device)
    kernel = _place_variant(True, grid.numel() // 2, scale, eps)
    inputs = g_regions.contiguous(), g_points.contiguous(), regions, deltas, offsets, grid.contiguous()
    kernel((programs, 2), *inputs, *results, partial, tokens)
    return *results, column_sum(partial).to(grid.dtype)


def _place_backward(ctx: Any, gradients: Any, g_regions: Tensor | None, g_points: Tensor | None) -> tuple:
    regions, deltas, offsets, grid = ctx.saved_tensors
    g_regions = torch.zeros_like(regions) if g_regions is None else g_regions
    if g_points is None:
        g_points = regions.new_zeros(*regions.shape[:2], grid.numel() // 2, 2)
    return *gradients(g_regions, g_points, regions, deltas, offsets, grid, *ctx.options), None, None


_place_points = FusedOp("place_points", _place, _place_gradients, backward=_place_backward)


def _supports_place(regions: Tensor, deltas: Tensor, offsets: Tensor, grid: Tensor, scale: float, eps: float) -> bool:
    if not dispatch.on_gpu(regions, deltas, offsets, grid) or regions.shape[-1] != 4:
        return False
    if dispatch.is_compiling() and dispatch.is_training():  # Inductor fuses the reference with what surrounds it
        return False
    return regions.dtype == torch.float32


@register_op("place_points", reference=place_points_reference, supports=_supports_place)
def place_points(
    regions: Tensor, deltas: Tensor, offsets: Tensor, grid: Tensor, scale: float, eps: float
) -> tuple[Tensor, Tensor]:
    return _place_points(regions, deltas, offsets, grid, scale, eps)


# Sampling features between pixels.
#
# Along one axis, a point at distance d from a pixel's centre takes the fraction max(0, 1 - d) of it, so at most two
# neighbouring pixels count; on several axes the fractions multiply. Pixel i of n has its centre at (i + 0.5) / n, and
# outside the features is zero: what `grid_sample(..., align_corners=False)` computes, on channels-last memory, in the
# dtype of the features with coordinates in their own.


def sample_reference(features: Tensor, points: Tensor) -> Tensor:
    """Interpolate features (B, C, H, W) linearly at points (B, M, P, 2), x y in [0, 1] -> (B, M, P, C).

    Or features (B, C, T, H, W) at points (B, M, P, 3), x y t.
    """
    rows, first, steps, weights = _neighbour_rows(features, points)
    total = rows[first] * weights[0].unsqueeze(-1)
    for step, weight in zip(steps[1:], weights[1:], strict=True):
        total = total + rows[first + step] * weight.unsqueeze(-1)
    return total.to(rows.dtype)


def _neighbour_rows(features: Tensor, points: Tensor) -> tuple[Tensor, Tensor, list[int], Tensor]:
    """All pixels as rows (B N, C), and the K rows around each point.

    Those are: the row of the first neighbour (B, M, P), steps from it to each neighbour (K), their weights
    (K, B, M, P).
    """
    size = features.shape[2:]
    first = torch.arange(points.shape[0], device=points.device).view(-1, 1, 1)  # the slowest axis is the image
    steps, weights = [0], torch.ones(1, 1, 1, 1, dtype=points.dtype, device=points.device)
    for axis, length in enumerate(size):
        at = points[..., len(size) - 1 - axis] * length - 0.5  # pixel i is centred at i
        low = at.long().clamp(0, length - 2 if length > 1 else 0)  # also for points far outside
        distance = at - low
        distances = [distance, distance - 1] if length > 1 else [distance]
        part = F.relu(1 - torch.stack(distances).abs())  # (2, B, M, P)
        weights = (weights.unsqueeze(1) * part).flatten(0, 1)
        first = first * length + low
        steps = [length * step + side for step in steps for side in range(len(distances))]
    rows = features.flatten(2).transpose(1, 2).flatten(0, 1)  # a view when channels-last
    return rows, first, steps, weights


if HAS_TRITON:

    @triton.jit
    def _first_neighbour(at, length):
        """Of a coordinate in pixels along one axis: the first of its two neighbours, and the distance to it."""
        low = tl.minimum(tl.maximum(at, 0.0), tl.maximum(length - 2, 0).to(tl.float32)).to(tl.int32)
        return low, at - low.to(tl.float32)

    @triton.jit
    def _neighbour_weights(distance, length):
        second = tl.maximum(1 - tl.abs(distance - 1), 0.0)
        return tl.maximum(1 - tl.abs(distance), 0.0), tl.where(length > 1, second, 0.0)

    @triton.jit
    def _weight_derivative(distance):
        """Derivative of max(0, 1 - |distance|)."""
        sign = tl.where(distance > 0, 1.0, tl.where(distance < 0, -1.0, 0.0))
        return tl.where(tl.abs(distance) < 1, -sign, 0.0)

    @triton.jit
    def _load_pixels(x_ptr, pixel, weight, channel, mask, CHANNELS: tl.constexpr):
        """Channels of the pixels (P, C) whose weight is not zero."""
        valid = (mask & (weight > 0))[:, None] & (channel < CHANNELS)[None, :]
        return tl.load(x_ptr + pixel[:, None] * CHANNELS + channel[None, :], mask=valid, other=0.0).to(tl.float32)

    @triton.jit
    def _locate_points(q_ptr, token, p, height, width, POINTS: tl.constexpr):
        """Points p of a token: index of the first neighbour in the image, distances to it, and the mask."""
        mask = p < POINTS
        source = q_ptr + (token.to(tl.int64) * POINTS + p) * 2
        column, right = _first_neighbour(tl.load(source, mask=mask, other=0.0) * width - 0.5, width)
        row, below = _first_neighbour(tl.load(source + 1, mask=mask, other=0.0) * height - 0.5, height)
        return row * width + column, right, below, mask

    @triton.jit
    def _interpolate(x_ptr, first, right, below, height, width, channel, mask, CHANNELS: tl.constexpr):
        """The weighted sum of every point's four neighbours (P, C)."""
        x0, x1 = _neighbour_weights(right, width)
        y0, y1 = _neighbour_weights(below, height)
        total = (y0 * x0)[:, None] * _load_pixels(x_ptr, first, y0 * x0, channel, mask, CHANNELS)
        total += (y0 * x1)[:, None] * _load_pixels(x_ptr, first + 1, y0 * x1, channel, mask, CHANNELS)
        total += (y1 * x0)[:, None] * _load_pixels(x_ptr, first + width, y1 * x0, channel, mask, CHANNELS)
        total += (y1 * x1)[:, None] * _load_pixels(x_ptr, first + width + 1, y1 * x1, channel, mask, CHANNELS)
        return total

    @jit
    def _sample_kernel(
        x_ptr, q_ptr, y_ptr, height, width, tokens,
        CHANNELS: tl.constexpr, POINTS: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(0)
        channel, p = tl.arange(0, C), tl.program_id(1) * P + tl.arange(0, P)
        first, right, below, mask = _locate_points(q_ptr, token, p, height, width, POINTS)
        x_ptr += (token // tokens).to(tl.int64) * height * width * CHANNELS
        y = _interpolate(x_ptr, first, right, below, height, width, channel, mask, CHANNELS)
        y_ptr += token.to(tl.int64) * POINTS * CHANNELS
        valid = mask[:, None] & (channel < CHANNELS)[None, :]
        tl.store(y_ptr + p[:, None] * CHANNELS + channel[None, :], y.to(y_ptr.dtype.element_ty), mask=valid)

    @triton.jit
    def _add_gradient(g_x_ptr, pixel, weight, g, channel, mask, CHANNELS: tl.constexpr):
        """Add a point's gradient to one of its pixels, which other programs may do at the same time.

        Nothing reads the sums before the kernel ends; a stricter memory order would flush caches at every addition.
        """
        valid = (mask & (weight > 0))[:, None] & (channel < CHANNELS)[None, :]
        at = g_x_ptr + pixel[:, None] * CHANNELS + channel[None, :]
        tl.atomic_add(at, weight[:, None] * g, mask=valid, sem="relaxed")

    @jit
    def _sample_backward_kernel(
        g_ptr, x_ptr, q_ptr, g_x_ptr, g_q_ptr, height, width, tokens,
        CHANNELS: tl.constexpr, POINTS: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    ):  # fmt: skip
        """Gradients of the features, added to g_x (float32, zeros before), and of the points."""
        token = tl.program_id(0)
        channel, p = tl.arange(0, C), tl.program_id(1) * P + tl.arange(0, P)
        first, right, below, mask = _locate_points(q_ptr, token, p, height, width, POINTS)
        image = (token // tokens).to(tl.int64) * height * width * CHANNELS
        x_ptr, g_x_ptr = x_ptr + image, g_x_ptr + image
        x0, x1 = _neighbour_weights(right, width)
        y0, y1 = _neighbour_weights(below, height)
        g_ptr += token.to(tl.int64) * POINTS * CHANNELS
        valid = mask[:, None] & (channel < CHANNELS)[None, :]
        g = tl.load(g_ptr + p[:, None] * CHANNELS + channel[None, :], mask=valid, other=0.0).to(tl.float32)
        # A weight of zero may have a slope: every neighbour inside the features is read.
        one = tl.zeros((P,), tl.float32) + 1
        has_right, has_below = tl.where(width > 1, one, 0.0), tl.where(height > 1, one, 0.0)
        a = tl.sum(g * _load_pixels(x_ptr, first, one, channel, mask, CHANNELS), 1)
        b = tl.sum(g * _load_pixels(x_ptr, first + 1, has_right, channel, mask, CHANNELS), 1)
        c = tl.sum(g * _load_pixels(x_ptr, first + width, has_below, channel, mask, CHANNELS), 1)
        d = tl.sum(g * _load_pixels(x_ptr, first + width + 1, has_right * has_below, channel, mask, CHANNELS), 1)
        g_x = _weight_derivative(right) * (y0 * a + y1 * c)
        g_x += has_right * _weight_derivative(right - 1) * (y0 * b + y1 * d)
        g_y = _weight_derivative(below) * (x0 * a + x1 * b)
        g_y += has_below * _weight_derivative(below - 1) * (x0 * c + x1 * d)
        target = g_q_ptr + (token.to(tl.int64) * POINTS + p) * 2
        tl.store(target, g_x * width, mask=mask)
        tl.store(target + 1, g_y * height, mask=mask)
        _add_gradient(g_x_ptr, first, y0 * x0, g, channel, mask, CHANNELS)
        _add_gradient(g_x_ptr, first + 1, y0 * x1, g, channel, mask, CHANNELS)
        _add_gradient(g_x_ptr, first + width, y1 * x0, g, channel, mask, CHANNELS)
        _add_gradient(g_x_ptr, first + width + 1, y1 * x1, g, channel, mask, CHANNELS)


def _block(number: int) -> int:
    return max(16, next_power_of_2(number))


@variant
def _sample_variant(backward: bool, channels: int, points: int) -> Kernel:
    """A program takes 16 points of a token."""
    kernel = _sample_backward_kernel if backward else _sample_kernel
    return Kernel(kernel, CHANNELS=channels, POINTS=points, P=16, C=_block(channels))


def _sample(features: Tensor, points: Tensor) -> Tensor:
    """features (B, C, H, W) -> (B, M, P, C)."""
    x, points = features.permute(0, 2, 3, 1).contiguous(), points.contiguous()
    batch, tokens, count, _ = points.shape
    sampled = torch.empty(batch, tokens, count, x.shape[3], dtype=x.dtype, device=x.device)
    kernel = _sample_variant(False, x.shape[3], count)
    kernel((batch * tokens, cdiv(count, 16)), x, points, sampled, x.shape[1], x.shape[2], tokens)
    return sampled


def _sample_gradients(g: Tensor, features: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of features, channels-last in memory, and points."""
    x, points = features.permute(0, 2, 3, 1).contiguous(), points.contiguous()
    batch, tokens, count, _ = points.shape
    g_x = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    g_points = torch.empty_like(points)
    kernel = _sample_variant(True, x.shape[3], count)
    kernel((batch * tokens, cdiv(count, 16)), g.contiguous(), x, points, g_x, g_points, x.shape[1], x.shape[2], tokens)
    return cast(g_x, x.dtype).permute(0, 3, 1, 2), g_points


_sample_op = FusedOp("sample", _sample, _sample_gradients)


def _supports_sample(features: Tensor, points: Tensor) -> bool:
    if not dispatch.on_gpu(features, points) or points.shape[-1] != 2 or points.dtype != torch.float32:
        return False
    return not dispatch.needs_determinism()  # gradients are added up in any order


@register_op("sample", reference=sample_reference, supports=_supports_sample)
def sample(features: Tensor, points: Tensor) -> Tensor:
    return _sample_op(features, points)


def _supports_embedding_bag(features: Tensor, points: Tensor) -> bool:
    return isinstance(features, Tensor) and not dispatch.is_compiling()


@sample.add("embedding_bag", supports=_supports_embedding_bag)
def _sample_by_embedding_bag(features: Tensor, points: Tensor) -> Tensor:
    """The reference's sum of K rows as one ATen operation, which reads every row once."""
    rows, first, steps, weights = _neighbour_rows(features, points)
    index = torch.stack([first + step for step in steps], dim=-1).flatten(0, 2)  # (B M P, K)
    # ATen has no gradient of the weights in bfloat16 on CUDA.
    wide = rows.float() if rows.is_cuda and rows.dtype == torch.bfloat16 else rows
    weights = weights.movedim(0, -1).flatten(0, 2).to(wide.dtype)
    total = F.embedding_bag(index, wide, mode="sum", per_sample_weights=weights).to(rows.dtype)
    return total.view(*first.shape, rows.shape[1])


# Sampling and mixing: what a token sampled, x (P, C), is mixed by the matrices M (C, C) and S (P, P) it generated,
#
#     h = x M + b,  k = S gelu(h) + c,  y = gelu(k)
#
# Autograd would save x, h, k and both activations, run six small products as six batches, and copy the gradients of M
# and S into that of their row. Here only the inputs are saved. Backward samples again, recomputes a token in one
# program whose matrices stay in registers and shared memory, and writes the gradient of the row where it belongs.


def sample_and_mix_reference(
    features: Tensor, points: Tensor, weights: Tensor, channel_bias: Tensor, point_bias: Tensor
) -> Tensor:
    """Sample features at every token's points, then mix channels (SparseFormer Eq. 5) and points (SparseFormer Eq. 6).

    features (B, C, H, W), points (B, M, P, 2), weights (B, M, C C + P P): the channel matrix as (in, out), then the
    point matrix as (out, in); channel_bias (C), point_bias (P) -> mixed samples (B, M, P, C).
    """
    channels, num_points = channel_bias.shape[0], point_bias.shape[0]
    matrices = weights.flatten(0, 1).split((channels * channels, num_points * num_points), dim=1)
    channel_matrix = matrices[0].unflatten(1, (channels, channels))  # (B M, C, C)
    point_matrix = matrices[1].unflatten(1, (num_points, num_points))  # (B M, P, P)
    mixed = sample(features, points).flatten(0, 1)  # (B M, P, C)
    mixed = F.gelu(torch.baddbmm(channel_bias.to(mixed.dtype), mixed, channel_matrix))  # SparseFormer Eq. 5
    # SparseFormer Eq. 6
    mixed = F.gelu(torch.baddbmm(point_bias.to(mixed.dtype).unsqueeze(1), point_matrix, mixed))
    return mixed.unflatten(0, weights.shape[:2])


if HAS_TRITON:

    @jit
    @no_type_check
    def _mix_kernel(
        x_ptr, q_ptr, w_ptr, cb_ptr, pb_ptr, y_ptr, height, width, tokens, step,
        CHANNELS: tl.constexpr, POINTS: tl.constexpr, P: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr,
        CHUNKS: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """One token: y = gelu(S gelu(x M + b) + c); `step` elements from one token's matrices to the next one's.

        A chunk of points at a time is sampled, mixed over its channels, and added to what every point gets from it:
        this needs so few registers that several tokens run concurrently on a multiprocessor.
        """
        EXACT: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
        token = tl.program_id(0)
        channel, p = tl.arange(0, C), tl.arange(0, P)
        mask, channel_mask = p < POINTS, channel < CHANNELS
        x_ptr += (token // tokens).to(tl.int64) * height * width * CHANNELS
        w_ptr += token.to(tl.int64) * step
        offset = channel[:, None] * CHANNELS + channel[None, :]
        matrix = tl.load(w_ptr + offset, mask=channel_mask[:, None] & channel_mask[None, :], other=0.0)
        bias = tl.load(cb_ptr + channel, mask=channel_mask, other=0.0).to(tl.float32)[None, :]
        w_ptr += CHANNELS * CHANNELS
        mixed = tl.zeros((P, C), tl.float32)
        for chunk in tl.static_range(CHUNKS):
            q = chunk * CHUNK + tl.arange(0, CHUNK)
            first, right, below, q_mask = _locate_points(q_ptr, token, q, height, width, POINTS)
            sampled = _interpolate(x_ptr, first, right, below, height, width, channel, q_mask, CHANNELS)
            sampled = gelu(tl.dot(sampled.to(matrix.dtype), matrix, input_precision=PRECISION) + bias, EXACT)
            valid = mask[:, None] & q_mask[None, :]
            across = tl.load(w_ptr + p[:, None] * POINTS + q[None, :], mask=valid, other=0.0)  # (P, CHUNK)
            mixed += tl.dot(across, sampled.to(across.dtype), input_precision=PRECISION)
        mixed = gelu(mixed + tl.load(pb_ptr + p, mask=mask, other=0.0).to(tl.float32)[:, None], EXACT)
        y_ptr += token.to(tl.int64) * POINTS * CHANNELS
        offset = p[:, None] * CHANNELS + channel[None, :]
        tl.store(y_ptr + offset, mixed.to(y_ptr.dtype.element_ty), mask=mask[:, None] & channel_mask[None, :])

    @triton.jit
    def _matrix_at(ptr, row, column, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
        """Addresses of some rows and columns of a matrix (HEIGHT, WIDTH), and their mask."""
        return ptr + row[:, None] * WIDTH + column[None, :], (row < HEIGHT)[:, None] & (column < WIDTH)[None, :]

    @triton.jit
    def _load_vector(ptr, at, LENGTH: tl.constexpr):
        return tl.load(ptr + at, mask=at < LENGTH, other=0.0).to(tl.float32)

    @triton.jit
    def _mix_channels(x, w_ptr, b_ptr, channel, CHANNELS: tl.constexpr, PRECISION: tl.constexpr):
        """M, gelu(x M + b), and the derivative of gelu there."""
        EXACT: tl.constexpr = w_ptr.dtype.element_ty == tl.float32
        at, mask = _matrix_at(w_ptr, channel, channel, CHANNELS, CHANNELS)
        m = tl.load(at, mask=mask, other=0.0)
        h = tl.dot(x, m, input_precision=PRECISION) + _load_vector(b_ptr, channel, CHANNELS)[None, :]
        return m, gelu(h, EXACT).to(m.dtype), gelu_derivative(h, EXACT).to(m.dtype)

    @triton.jit
    def _mix_points_gradient(
        s, active, c_ptr, g_ptr, p, channel, POINTS: tl.constexpr, CHANNELS: tl.constexpr, PRECISION: tl.constexpr
    ):
        """The gradient of S a + c, in float32."""
        k = tl.dot(s, active, input_precision=PRECISION) + _load_vector(c_ptr, p, POINTS)[:, None]
        at, mask = _matrix_at(g_ptr, p, channel, POINTS, CHANNELS)
        return tl.load(at, mask=mask, other=0.0).to(tl.float32) * gelu_derivative(k, s.dtype == tl.float32)

    @triton.jit
    def _mix_channels_gradient(s, g, derivative, sums_ptr, channel, CHANNELS: tl.constexpr, PRECISION: tl.constexpr):
        """The gradient of x M + b; the sums of its columns are stored."""
        d = tl.dot(tl.trans(s), g, input_precision=PRECISION) * derivative.to(tl.float32)
        tl.store(sums_ptr + channel, tl.sum(d, 0), mask=channel < CHANNELS)
        return d.to(s.dtype)

    @jit
    @no_type_check
    def _mix_backward_kernel(
        g_ptr, x_ptr, w_ptr, b_ptr, c_ptr, g_x_ptr, g_w_ptr, sums_ptr, step,
        POINTS: tl.constexpr, CHANNELS: tl.constexpr, P: tl.constexpr, C: tl.constexpr, SLICE: tl.constexpr,
        PRECISION: tl.constexpr,
    ):  # fmt: skip
        """One token: gradients of its samples and of its matrices, and (C + P) what it adds to those of b and c.

        `step` elements from row to row in w; g_w is dense. Rows of M's gradient come SLICE at a time. Sizes are
        constants, so that loads are as wide as they allow. Beyond them x, w and g are zero, and so is every gradient.
        """
        token = tl.program_id(0).to(tl.int64)
        x_ptr += token * POINTS * CHANNELS
        g_ptr += token * POINTS * CHANNELS
        g_x_ptr += token * POINTS * CHANNELS
        w_ptr += token * step
        g_w_ptr += token * (CHANNELS * CHANNELS + POINTS * POINTS)
        sums_ptr += token * (CHANNELS + POINTS)
        p, channel = tl.arange(0, P), tl.arange(0, C)
        at, mask = _matrix_at(x_ptr, p, channel, POINTS, CHANNELS)
        x = tl.load(at, mask=mask, other=0.0)
        at, mask = _matrix_at(w_ptr + CHANNELS * CHANNELS, p, p, POINTS, POINTS)
        s = tl.load(at, mask=mask, other=0.0)
        m, active, derivative = _mix_channels(x, w_ptr, b_ptr, channel, CHANNELS, PRECISION)
        g = _mix_points_gradient(s, active, c_ptr, g_ptr, p, channel, POINTS, CHANNELS, PRECISION)
        total = tl.sum(g, 1)
        g = g.to(s.dtype)
        d = _mix_channels_gradient(s, g, derivative, sums_ptr, channel, CHANNELS, PRECISION)
        g_s = tl.dot(g, tl.trans(active), input_precision=PRECISION)
        tl.store(sums_ptr + CHANNELS + p, total, mask=p < POINTS)
        at, mask = _matrix_at(g_w_ptr + CHANNELS * CHANNELS, p, p, POINTS, POINTS)
        tl.store(at, g_s.to(s.dtype), mask=mask)
        g_x = tl.dot(d, tl.trans(m), input_precision=PRECISION)
        at, mask = _matrix_at(g_x_ptr, p, channel, POINTS, CHANNELS)
        tl.store(at, g_x.to(s.dtype), mask=mask)
        for start in tl.static_range(0, C, SLICE):
            row = start + tl.arange(0, SLICE)
            at, mask = _matrix_at(x_ptr, p, row, POINTS, CHANNELS)
            x = tl.trans(tl.load(at, mask=mask, other=0.0))
            at, mask = _matrix_at(g_w_ptr, row, channel, CHANNELS, CHANNELS)
            tl.store(at, tl.dot(x, d, input_precision=PRECISION).to(s.dtype), mask=mask)


@variant
def _mix_variant(backward: bool, channels: int, points: int, dtype: torch.dtype) -> Kernel:
    """One token per program.

    Backward with its columns in two parts, 64 and 32 of 96 channels, would need fewer registers, but Triton 3.6
    compiles that to a product that reads beyond its shared memory.
    """
    exact = dtype == torch.float32
    tiles = dict(CHANNELS=channels, POINTS=points, P=_block(points), C=_block(channels))
    constants: dict[str, int | str] = {**tiles, "PRECISION": "ieee" if exact else "tf32"}
    if backward:
        rows, warps = (32, 16) if exact else (64, 4)
        return Kernel(_mix_backward_kernel, **constants, SLICE=min(rows, _block(channels)), num_warps=warps)
    return Kernel(_mix_kernel, **constants, CHUNK=MIX_CHUNK, CHUNKS=cdiv(points, MIX_CHUNK), num_warps=4)


def _dense_rows(weights: Tensor) -> Tensor:
    """weights (B, M, C C + P P) with one step from token to token; the output of a product may have gaps."""
    batch_step, step, one = weights.stride()
    dense = one == 1 and step >= weights.shape[2] and batch_step == weights.shape[1] * step
    return weights if dense else weights.contiguous()


def _mix(features: Tensor, points: Tensor, weights: Tensor, channel_bias: Tensor, point_bias: Tensor) -> Tensor:
    x, points, weights = features.permute(0, 2, 3, 1).contiguous(), points.contiguous(), _dense_rows(weights)
    (batch, tokens, count, _), channels = points.shape, x.shape[3]
    mixed = torch.empty(batch, tokens, count, channels, dtype=weights.dtype, device=x.device)
    kernel = _mix_variant(False, channels, count, weights.dtype)
    sizes = x.shape[1], x.shape[2], tokens, weights.stride(1)
    kernel((batch * tokens,), x, points, weights, channel_bias, point_bias, mixed, *sizes)
    return mixed


def _mix_gradients(
    g: Tensor, features: Tensor, points: Tensor, weights: Tensor, channel_bias: Tensor, point_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of all inputs but g."""
    weights = _dense_rows(weights)
    (batch, tokens, count, _), channels = points.shape, features.shape[1]
    sampled = cast(_sample(features, points), weights.dtype)
    g_sampled = torch.empty_like(sampled)
    g_weights = torch.empty(weights.shape, dtype=weights.dtype, device=weights.device)
    sums = torch.empty(batch * tokens, channels + count, dtype=torch.float32, device=weights.device)
    kernel = _mix_variant(True, channels, count, weights.dtype)
    inputs = g.contiguous(), sampled, weights, channel_bias, point_bias
    kernel((batch * tokens,), *inputs, g_sampled, g_weights, sums, weights.stride(1))
    g_features, g_points = _sample_gradients(g_sampled, features, points)
    total = column_sum(sums)
    g_channel_bias, g_point_bias = total[:channels].to(channel_bias.dtype), total[channels:].to(point_bias.dtype)
    return g_features, g_points, g_weights, g_channel_bias.clone(), g_point_bias.clone()


_mix_op = FusedOp("sample_and_mix", _mix, _mix_gradients)


def _supports_mix(features: Tensor, points: Tensor, weights: Tensor, channel_bias: Tensor, point_bias: Tensor) -> bool:
    if not dispatch.on_gpu(features, points, weights) or points.shape[-1] != 2 or points.dtype != torch.float32:
        return False
    channels, count = features.shape[1], points.shape[2]
    if channels > 128 or count > 64:
        return False
    if not dispatch.is_training():
        return True
    # In float32 the matrices of backward fill shared memory sooner.
    small = weights.dtype != torch.float32 or (count <= 16 and channels <= 48)
    return small and not dispatch.needs_determinism()


@register_op("sample_and_mix", reference=sample_and_mix_reference, supports=_supports_mix)
def sample_and_mix(
    features: Tensor, points: Tensor, weights: Tensor, channel_bias: Tensor, point_bias: Tensor
) -> Tensor:
    return _mix_op(features, points, weights, channel_bias, point_bias)


class _ClampGradient(torch.autograd.Function):
    @staticmethod
    def forward(values: Tensor, bound: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (bound,) = ctx.saved_tensors
        return torch.clamp(g, -bound, bound), None


def clamp_gradient(values: Tensor, bound: Tensor) -> Tensor:
    """The same values; in backward their gradient is clamped elementwise to ± bound (a scalar tensor)."""
    return _ClampGradient.apply(values, bound) if dispatch.is_training() else values
