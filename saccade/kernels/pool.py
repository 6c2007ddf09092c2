"""The end of a stem in one pass: batch norm or bias, 3x3 max pooling of stride 2, ReLU, pixels normalised.

The map in front of the pooling is the largest of the whole model; the library goes over it once for the bias or the
norm, once for the ReLU, once to pool it, and twice more over what is left. Here it is read once; and where it learns,
written once on the way back: every pixel asks the four windows at most that it stands in whether it was their largest.
Compilers take the learning one as an operator they do not look into.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels import HAS_TRITON, in_type
from saccade.kernels.launch import Launch, planned
from saccade.kernels.linear import column_sum
from saccade.kernels.norm_relu import Norm
from saccade.kernels.sizes import parts, power_of_2

WIDEST = 512  # channels


class PixelNorm(NamedTuple):
    """Every pixel normalised over its channels, then multiplied."""

    eps: float
    scale: float = 1.0


def pool_relu_twin(features: Tensor, norm: Norm, pixels: PixelNorm | None = None) -> Tensor:
    """features (B, C, H, W) -> (B, C, H/2, W/2)."""
    return normalised(F.relu(F.max_pool2d(norm.apply(features), 3, stride=2, padding=1)), pixels)


def normalised(pooled: Tensor, pixels: PixelNorm | None) -> Tensor:
    """(B, C, H, W) -> (B, C, H, W)."""
    if pixels is None:
        return pooled
    normed = F.layer_norm(pooled.permute(0, 2, 3, 1), (pooled.shape[1],), eps=pixels.eps) * pixels.scale
    return normed.permute(0, 3, 1, 2)


if HAS_TRITON:
    import triton
    import triton.language as tl
    from torch.library import custom_op

    from saccade.kernels.norm_relu import _affine, _pointers

    @triton.jit
    def _pool_kernel(
        x_pointer, w_pointer, b_pointer, m_pointer, v_pointer, y_pointer,
        i_pointer, r_pointer, height, width, out_height, out_width, channels, eps, pixel_eps, pixel_scale,
        NORM: tl.constexpr, RELU: tl.constexpr, PIXELS: tl.constexpr, LEARN: tl.constexpr,
        COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """LEARN keeps where the largest stood in its window, 0 to 8, or 9 where ReLU gave 0; and the pixels' scale."""
        image, row = tl.program_id(0) // out_height, tl.program_id(0) % out_height
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
        channel = tl.arange(0, CHANNELS)[None, :]
        held = channel < channels
        gain, shift = _affine(w_pointer, b_pointer, m_pointer, v_pointer, channel, held, eps, NORM)
        x_pointer += image.to(tl.int64) * height * width * channels
        best = tl.full((COLUMNS, CHANNELS), float("-inf"), tl.float32)
        where = tl.zeros((COLUMNS, CHANNELS), tl.int32)
        for i in tl.static_range(3):
            for j in tl.static_range(3):
                down, right = 2 * row + i - 1 + tl.zeros_like(column), 2 * column + j - 1
                there = (down >= 0) & (down < height) & (right >= 0) & (right < width) & held
                x = tl.load(x_pointer + (down * width + right) * channels + channel, mask=there, other=0.0)
                x = tl.where(there, x.to(tl.float32) * gain + shift, float("-inf"))
                larger = (x > best) | (x != x)  # NaN is the largest, as in the library
                if LEARN:
                    where = tl.where(larger, 3 * i + j, where)
                best = tl.where(larger, x, best)
        y = best
        if RELU:
            y = tl.where(best < 0, 0.0, best)
            where = tl.where(best > 0, where, 9)
        at = tl.program_id(0).to(tl.int64) * out_width + column
        there = held & (column < out_width)
        if PIXELS:
            y = tl.where(held, y, 0.0)
            y = tl.where(held, y - tl.sum(y, 1)[:, None] / channels, 0.0)
            scale = pixel_scale * tl.rsqrt(tl.sum(y * y, 1) / channels + pixel_eps)[:, None]
            y *= scale
            if LEARN:
                tl.store(r_pointer + at, scale, mask=column < out_width)
        tl.store(y_pointer + at * channels + channel, y.to(y_pointer.dtype.element_ty), mask=there)
        if LEARN:
            tl.store(i_pointer + at * channels + channel, where.to(tl.uint8), mask=there)

    @triton.jit
    def _open_kernel(
        g_pointer, y_pointer, i_pointer, r_pointer, d_pointer, rows, channels, pixel_scale,
        PIXELS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """The gradient in front of the pixels' norm and of the ReLU."""
        line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        row, channel = line[:, None], tl.arange(0, CHANNELS)[None, :]
        mask = (row < rows) & (channel < channels)
        offset = row * channels + channel
        g = tl.load(g_pointer + offset, mask=mask, other=0.0).to(tl.float32)
        if PIXELS:
            normed = tl.load(y_pointer + offset, mask=mask, other=0.0).to(tl.float32) / pixel_scale
            scale = tl.load(r_pointer + line, mask=line < rows, other=0.0)[:, None]  # once a row, not once a value
            along = tl.sum(g * normed, 1)[:, None] / channels
            g = (g - tl.sum(g, 1)[:, None] / channels - normed * along) * scale
        g = tl.where(tl.load(i_pointer + offset, mask=mask, other=9) < 9, g, 0.0)
        tl.store(d_pointer + offset, g.to(d_pointer.dtype.element_ty), mask=mask)

    @triton.jit
    def _back_kernel(
        g_pointer, i_pointer, d_pointer, height, width, out_height, out_width, channels,
        COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """The gradient of the map: of every window a pixel stands in, where it was the largest."""
        image, row = tl.program_id(0) // height, tl.program_id(0) % height
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
        channel = tl.arange(0, CHANNELS)[None, :]
        start = image.to(tl.int64) * out_height * out_width * channels
        total = tl.zeros((COLUMNS, CHANNELS), tl.float32)
        for i in tl.static_range(3):
            down = (row + 1 - i) // 2
            if ((row + 1 - i) % 2 == 0) & (down < out_height) & (row + 1 >= i):
                for j in tl.static_range(3):
                    right = (column + 1 - j) // 2
                    there = ((column + 1 - j) % 2 == 0) & (column + 1 >= j) & (right < out_width) & (channel < channels)
                    offset = start + (down * out_width + right) * channels + channel
                    mine = tl.load(i_pointer + offset, mask=there, other=9) == 3 * i + j
                    g = tl.load(g_pointer + offset, mask=there, other=0.0)  # all, so that they come in one piece
                    total += tl.where(mine, g.to(tl.float32), 0.0)
        offset = (tl.program_id(0).to(tl.int64) * width + column) * channels + channel
        mask = (column < width) & (channel < channels)
        tl.store(d_pointer + offset, total.to(d_pointer.dtype.element_ty), mask=mask)

    def _launch(features: Tensor, norm: Norm | None, relu: bool, pixels: PixelNorm | None, learn: bool):
        """features (B, C, H, W) -> (B, H/2, W/2, C); where the largest stood and the pixels' scale, if it learns."""
        batch, channels, height, width = features.shape
        out_height, out_width = (height + 1) // 2, (width + 1) // 2
        shape = (batch, out_height, out_width)
        pooled = torch.empty(*shape, channels, dtype=features.dtype, device=features.device)
        where = torch.empty_like(pooled, dtype=torch.uint8) if learn else pooled
        scale = torch.empty(shape, dtype=torch.float32, device=features.device) if learn and pixels else pooled
        kind, pointers = _pointers(norm, features)
        eps = 0.0 if norm is None else norm.eps
        start = _pooling(batch, height, width, channels, eps, kind, relu, pixels, learn)
        start(features, *pointers, pooled, where, scale)
        return pooled, where, scale

    def _tile(width: int, channels: int, elements: int = 2048) -> dict[str, int]:
        wide = max(16, power_of_2(channels))
        return dict(COLUMNS=max(1, min(elements // wide, power_of_2(width))), CHANNELS=wide)

    @planned
    def _pooling(
        batch: int, height: int, width: int, channels: int, eps: float, kind: int, relu: bool,
        pixels: PixelNorm | None, learn: bool,
    ) -> Launch:  # fmt: skip
        out_height, out_width = (height + 1) // 2, (width + 1) // 2
        tile = _tile(out_width, channels, 1024 if learn else 2048)
        return Launch(
            _pool_kernel, (batch * out_height, parts(out_width, tile["COLUMNS"])), height, width, out_height,
            out_width, channels, eps, *(pixels or (0.0, 1.0)), NORM=kind, RELU=relu, PIXELS=pixels is not None,
            LEARN=learn, **tile,
        )  # fmt: skip

    @planned
    def _opening(rows: int, channels: int, pixels: PixelNorm | None) -> Launch:
        wide = max(16, power_of_2(channels))
        tall = max(1, 2048 // wide)
        return Launch(
            _open_kernel, (parts(rows, tall),), rows, channels, pixels.scale if pixels else 1.0,
            PIXELS=pixels is not None, ROWS=tall, CHANNELS=wide,
        )  # fmt: skip

    @planned
    def _going_back(batch: int, height: int, width: int, channels: int) -> Launch:
        tile = _tile(width, channels)
        grid = (batch * height, parts(width, tile["COLUMNS"]))
        return Launch(_back_kernel, grid, height, width, (height + 1) // 2, (width + 1) // 2, channels, **tile)

    def _gradients(
        g: Tensor, pooled: Tensor, where: Tensor, scale: Tensor, size: Sequence[int], biased: bool, relu: bool,
        pixels: PixelNorm | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """g (B, H/2, W/2, C) -> the gradients of the map (B, H, W, C), and of the bias in float32 where it has one."""
        g = g.contiguous()
        batch, channels = g.shape[0], g.shape[3]
        rows = g.numel() // channels
        if relu or pixels:
            opened = torch.empty_like(g)
            _opening(rows, channels, pixels)(g, pooled, where, scale, opened)
            g = opened
        g_features = torch.empty(batch, *size, channels, dtype=g.dtype, device=g.device)
        _going_back(batch, *size, channels)(g, where, g_features)
        return g_features, column_sum(g.view(rows, channels)) if biased else None

    class _Pool(torch.autograd.Function):
        @staticmethod
        def forward(ctx, features: Tensor, bias: Tensor | None, relu: bool, pixels: PixelNorm | None) -> Tensor:
            pooled, where, scale = _launch(features, None if bias is None else Norm(bias), relu, pixels, True)
            ctx.size, ctx.relu, ctx.pixels = features.shape[2:], relu, pixels
            ctx.bias_type = None if bias is None else bias.dtype
            ctx.save_for_backward(where, *((pooled, scale) if pixels else ()))
            return pooled.permute(0, 3, 1, 2)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g: Tensor):
            where, *normed = ctx.saved_tensors
            pooled, scale = normed or (where, where)
            kind, g = ctx.bias_type, g.permute(0, 2, 3, 1)
            g_features, g_bias = _gradients(g, pooled, where, scale, ctx.size, kind is not None, ctx.relu, ctx.pixels)
            return g_features.permute(0, 3, 1, 2), None if g_bias is None else in_type(g_bias, kind), None, None

    # For compilers: operators they do not look into, over maps (B, H, W, C); the pixels' norm as numbers, or None.

    def _pixels(eps: float | None, scale: float | None) -> PixelNorm | None:
        return None if eps is None or scale is None else PixelNorm(eps, scale)

    def _pool_rows(
        x: Tensor, bias: Tensor | None, relu: bool, eps: float | None, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, H, W, C) -> pooled (B, H/2, W/2, C), where the largest stood, and the pixels' scale or nothing."""
        norm, pixels = None if bias is None else Norm(bias.contiguous()), _pixels(eps, scale)
        pooled, where, scales = _launch(x.contiguous().permute(0, 3, 1, 2), norm, relu, pixels, True)
        return pooled, where, scales if pixels else x.new_empty(0, dtype=torch.float32)

    def _pool_rows_gradients(
        g: Tensor, pooled: Tensor | None, where: Tensor, scales: Tensor | None, height: int, width: int, biased: bool,
        relu: bool, eps: float | None, scale: float | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Gradients of the map and of the bias, in float32; of no bias, nothing."""
        given = (where if value is None else value.contiguous() for value in (pooled, where, scales))
        g_x, g_bias = _gradients(g, *given, (height, width), biased, relu, _pixels(eps, scale))
        return g_x, g.new_empty(0, dtype=torch.float32) if g_bias is None else g_bias

    _op = custom_op("saccade::pool", _pool_rows, mutates_args=())
    _gradients_op = custom_op("saccade::pool_backward", _pool_rows_gradients, mutates_args=())

    @_op.register_fake
    def _(
        x: Tensor, bias: Tensor | None, relu: bool, eps: float | None, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        shape = x.shape[0], (x.shape[1] + 1) // 2, (x.shape[2] + 1) // 2
        pooled = x.new_empty(*shape, x.shape[3])
        scales = x.new_empty(*(0,) if eps is None else shape, dtype=torch.float32)
        return pooled, torch.empty_like(pooled, dtype=torch.uint8), scales

    @_gradients_op.register_fake
    def _(
        g: Tensor, pooled: Tensor | None, where: Tensor, scales: Tensor | None, height: int, width: int, biased: bool,
        relu: bool, eps: float | None, scale: float | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        channels = g.shape[3]
        return g.new_empty(g.shape[0], height, width, channels), g.new_empty(channels * biased, dtype=torch.float32)

    def _save(ctx, inputs, output) -> None:
        x, bias, *ctx.switches = inputs
        pooled, where, scales = output
        ctx.size, ctx.bias_type = x.shape[1:3], None if bias is None else bias.dtype
        ctx.mark_non_differentiable(where, scales)
        ctx.normed = ctx.switches[1] is not None
        ctx.save_for_backward(where, *((pooled, scales) if ctx.normed else ()))

    def _backward(ctx, g: Tensor, *_):
        where, *normed = ctx.saved_tensors
        pooled, scales = normed or (None, None)
        kind = ctx.bias_type
        g_x, g_bias = _gradients_op(g, pooled, where, scales, *ctx.size, kind is not None, *ctx.switches)
        return g_x, None if kind is None else g_bias.to(kind), None, None, None

    _op.register_autograd(_backward, setup_context=_save)


def pool_relu(features: Tensor, norm: Norm, pixels: PixelNorm | None = None) -> Tensor:
    """features (B, C, H, W), channels-last in memory, of at most `WIDEST` channels -> (B, C, H/2, W/2). No gradient."""
    return _launch(features, norm, True, pixels, False)[0].permute(0, 3, 1, 2)


def pool(features: Tensor, bias: Tensor | None = None, relu: bool = False, pixels: PixelNorm | None = None) -> Tensor:
    """The same with gradients: pixels(relu(max_pool(features) + bias)); ReLU and the norm where they are asked for."""
    if torch.compiler.is_compiling():
        return _op(features.permute(0, 2, 3, 1), bias, relu, *(pixels or (None, None)))[0].permute(0, 3, 1, 2)
    return _Pool.apply(features, bias, relu, pixels)


def fits(features: Tensor) -> bool:
    """Whether the kernels take this map (B, C, H, W): on a GPU, channels-last in memory, not too wide."""
    last = features.is_contiguous(memory_format=torch.channels_last)
    return features.is_cuda and last and features.shape[1] <= WIDEST


def pool_twin(
    features: Tensor, bias: Tensor | None = None, relu: bool = False, pixels: PixelNorm | None = None
) -> Tensor:
    """The same by the library."""
    pooled = F.max_pool2d(features, 3, stride=2, padding=1)
    pooled = pooled if bias is None else pooled + bias.to(pooled.dtype).view(-1, 1, 1)
    return normalised(F.relu(pooled) if relu else pooled, pixels)
