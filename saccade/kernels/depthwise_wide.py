"""Depth-wise convolution over a wide neighbourhood, 5x5 or 7x7, with the GELU behind it, on channels-last maps.

The library takes five times as long for PaCa's clusterings as 49 products and sums an output do. All else may cost
little beside them, so every value that is read is used often. A thread owns two channels, whose taps it holds in
registers, and a strip of four columns, down which it walks: of a row it reads ten columns, while it works on the row
before, and adds each to the seven rows of outputs it touches. The topmost of these is then whole, and is written.

Per output, of 63 instructions (79 with a GELU): 49 products and sums, 1.3 reads, 5.6 conversions, half a store.

Only x is kept for the way back, where what stands before the GELU is computed again. The gradient of x is the same
convolution with its taps turned round; that of the weight is the library's.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels import HAS_TRITON, in_type, learns
from saccade.kernels.launch import Launch, planned
from saccade.kernels.linear import column_sum
from saccade.kernels.sizes import parts, power_of_2

SIDES = (5, 7)
TALL = 56  # rows a strip has at most
WARPS = 1056  # that a GPU runs at once, eight for every multiprocessor of an H200: fewer walk down shorter strips


def depthwise_wide_twin(features: Tensor, weight: Tensor, bias: Tensor, gelu: bool = False) -> Tensor:
    """(gelu) conv(features), features (B, C, H, W), weight (C, 1, K, K), by the library."""
    mixed = F.conv2d(features, weight, bias, padding=weight.shape[2] // 2, groups=features.shape[1])
    return F.gelu(mixed) if gelu else mixed


def as_taps(weight: Tensor) -> Tensor:
    """weight (C, 1, K, K) -> (K K, C): a tap of all channels lies together."""
    return weight.flatten(1).t().contiguous()


if HAS_TRITON:
    import triton
    import triton.language as tl
    from torch.library import custom_op

    from saccade.kernels.gelu import gelu as _gelu
    from saccade.kernels.gelu import gelu_slope

    @triton.jit
    def _read(pointer, column, width, ok, WIDE: tl.constexpr, COUNT: tl.constexpr):
        """COUNT columns from this one on, zeros outside the map."""
        found = ()
        for j in tl.static_range(COUNT):
            inside = ok & (column + j >= 0) & (column + j < width)
            value = tl.load(pointer + j * WIDE, mask=inside, other=0.0)
            found += (value.to(tl.float32),)
        return found

    @triton.jit
    def _write(
        y_pointer, g_pointer, sums, column, width, ok,
        FROM: tl.constexpr, GELU: tl.constexpr, SLOPE: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """A row of outputs, which stand in `sums` from FROM on."""
        EXACT: tl.constexpr = y_pointer.dtype.element_ty == tl.float32
        for c in tl.static_range(COLUMNS):
            y, inside = sums[FROM + c], ok & (column + c < width)
            if GELU:
                y = _gelu(y, EXACT)
            if SLOPE:
                y = tl.load(g_pointer + c * WIDE, mask=inside, other=0.0).to(tl.float32) * gelu_slope(y, EXACT)
            tl.store(y_pointer + c * WIDE, y.to(y_pointer.dtype.element_ty), mask=inside)

    @triton.jit
    def _kernel(
        x_pointer, w_pointer, b_pointer, g_pointer, y_pointer, height, width, rows,
        WIDE: tl.constexpr, SIDE: tl.constexpr, FLIP: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr,
        SLOPE: tl.constexpr, COLUMNS: tl.constexpr, STRIPS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """y = (gelu) (conv(x) + b); FLIP turns the taps round; SLOPE: y = g * slope of gelu at the result.

        STRIPS strips, each of COLUMNS columns, of CHANNELS of the WIDE channels, down so many rows.
        """
        HALF: tl.constexpr = SIDE // 2
        COUNT: tl.constexpr = COLUMNS + SIDE - 1
        runs = tl.cdiv(height, rows)
        image, first = tl.program_id(0) // runs, tl.program_id(0) % runs * rows
        column = (tl.program_id(1) * STRIPS + tl.arange(0, STRIPS)[:, None]) * COLUMNS
        channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        ok = channel < WIDE
        zero = tl.zeros((STRIPS, CHANNELS), tl.float32)
        taps = ()
        for k in tl.static_range(SIDE * SIDE):
            tap = tl.load(w_pointer + (SIDE * SIDE - 1 - k if FLIP else k) * WIDE + channel, mask=ok, other=0.0)
            taps += (zero + tap.to(tl.float32),)
        if BIAS:
            zero += tl.load(b_pointer + channel, mask=ok, other=0.0).to(tl.float32)
        sums = ()  # of the rows of outputs from HALF above the row of input to HALF - 1 below it
        for _ in tl.static_range((SIDE - 1) * COLUMNS):
            sums += (zero,)

        begin, end = tl.maximum(first - HALF, 0), tl.minimum(first + rows + HALF, height)
        last = tl.minimum(first + rows, height)
        start = image.to(tl.int64) * height * width * WIDE
        x_pointer, g_pointer, y_pointer = x_pointer + start, g_pointer + start, y_pointer + start
        source, target = (column - HALF) * WIDE + channel, column * WIDE + channel
        ahead = _read(x_pointer + (begin * width * WIDE + source), column - HALF, width, ok, WIDE, COUNT)
        for row in range(begin, end):
            x, below = ahead, tl.minimum(row + 1, end - 1)
            ahead = _read(x_pointer + (below * width * WIDE + source), column - HALF, width, ok, WIDE, COUNT)
            added = ()
            for r in tl.static_range(SIDE):
                for c in tl.static_range(COLUMNS):
                    y = zero
                    if r < SIDE - 1:
                        y = sums[r * COLUMNS + c]
                    for k in tl.static_range(SIDE):
                        y = tl.fma(x[c + k], taps[(SIDE - 1 - r) * SIDE + k], y)
                    added += (y,)
            done = row - HALF  # has now seen all its rows
            if done >= first:
                place = done * width * WIDE + target
                _write(y_pointer + place, g_pointer + place, added, column, width, ok, 0, GELU, SLOPE, WIDE, COLUMNS)
            sums = added[COLUMNS:]
        for r in tl.static_range(HALF):  # rows at the lower edge of the map, which has no more below them
            done = end - HALF + r
            if (done >= first) & (done < last):
                place = done * width * WIDE + target
                to, through = y_pointer + place, g_pointer + place
                _write(to, through, sums, column, width, ok, r * COLUMNS, GELU, SLOPE, WIDE, COLUMNS)

    def _tile(batch: int, height: int, width: int, channels: int) -> dict[str, int]:
        """Rows a program walks down, its strips of columns (more than a warp's where none is left over), channels."""
        columns, wide = 4, 64 if channels % 64 == 0 else min(32, power_of_2(channels))
        least = strips = 64 // wide  # two channels of a strip for every thread
        padded = parts(width, columns * least) * least
        while strips < 4 * least and padded % (2 * strips) == 0:
            strips *= 2
        warps = strips // least
        others = batch * warps * parts(width, columns * strips) * parts(channels, wide)
        runs = max(parts(height, TALL), min(parts(height, 7), WARPS // others))
        return dict(rows=parts(height, runs), COLUMNS=columns, STRIPS=strips, CHANNELS=wide, num_warps=warps)

    @planned
    def _convolving(
        batch: int, height: int, width: int, channels: int, side: int, flip: bool, bias: bool, gelu: bool, slope: bool
    ) -> Launch:
        tile = _tile(batch, height, width, channels)
        rows = tile.pop("rows")
        grid = (
            batch * parts(height, rows),
            parts(width, tile["COLUMNS"] * tile["STRIPS"]),
            parts(channels, tile["CHANNELS"]),
        )
        switches = dict(WIDE=channels, SIDE=side, FLIP=flip, BIAS=bias, GELU=gelu, SLOPE=slope)
        return Launch(_kernel, grid, height, width, rows, **switches, **tile)

    def _convolve(sizes: tuple[int, ...], x: Tensor, taps: Tensor, bias: Tensor, gelu: bool) -> Tensor:
        """x, of any shape, in memory as sizes (B, H, W, C, K) say -> y of that shape."""
        y = torch.empty_like(x)
        _convolving(*sizes, False, True, gelu, False)(x, taps, bias, x, y)
        return y

    def _differentiate(
        sizes: tuple[int, ...], g: Tensor, x: Tensor, taps: Tensor, weight: Tensor, bias: Tensor, gelu: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of x, weight and bias; g, x and the first (B, C, H, W), channels-last in memory."""
        channels, side = sizes[3:]
        if gelu:
            behind = torch.empty_like(x)
            _convolving(*sizes, False, True, False, True)(x, taps, bias, g, behind)
            g = behind
        g_x = torch.empty_like(x)
        _convolving(*sizes, True, False, False, False)(g, taps, bias, g, g_x)
        layout = [1, 1], [side // 2, side // 2], [1, 1], False, [0, 0], channels
        given = g, x, in_type(weight, x.dtype), None, *layout, [False, True, False]
        g_weight = torch.ops.aten.convolution_backward(*given)[1]
        g_bias = column_sum(g.permute(0, 2, 3, 1).view(-1, channels))
        return g_x, in_type(g_weight, weight.dtype), in_type(g_bias, bias.dtype)

    class _DepthwiseWide(torch.autograd.Function):
        """Of maps (B, C, H, W), channels-last."""

        @staticmethod
        def forward(ctx, features: Tensor, weight: Tensor, bias: Tensor, gelu: bool) -> Tensor:
            ctx.gelu, taps = gelu, as_taps(weight)
            ctx.save_for_backward(features, taps, weight, bias)
            return _convolve(_sizes(features, weight), features, taps, bias, gelu)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g: Tensor):
            features, taps, weight, bias = ctx.saved_tensors
            g = in_type(g, features.dtype).contiguous(memory_format=torch.channels_last)
            return *_differentiate(_sizes(features, weight), g, features, taps, weight, bias, ctx.gelu), None

    def _sizes(features: Tensor, weight: Tensor) -> tuple[int, ...]:
        batch, channels, height, width = features.shape
        return batch, height, width, channels, weight.shape[2]

    def _forward(x: Tensor, weight: Tensor, bias: Tensor, gelu: bool) -> Tensor:
        """x (B, H, W, C) -> y (B, H, W, C)."""
        return _convolve((*x.shape, weight.shape[2]), x.contiguous(), as_taps(weight), bias, gelu)

    def _gradients(g: Tensor, x: Tensor, weight: Tensor, bias: Tensor, gelu: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of x (B, H, W, C), weight and bias, each in the order of its shape."""
        sizes, g, x = (*x.shape, weight.shape[2]), g.contiguous(), x.contiguous()
        maps = g.permute(0, 3, 1, 2), x.permute(0, 3, 1, 2)
        g_x, g_weight, g_bias = _differentiate(sizes, *maps, as_taps(weight), weight, bias, gelu)
        return g_x.permute(0, 2, 3, 1), g_weight.contiguous(), g_bias

    _op = custom_op("saccade::depthwise_wide", _forward, mutates_args=())
    _gradients_op = custom_op("saccade::depthwise_wide_backward", _gradients, mutates_args=())

    @_op.register_fake
    def _(x: Tensor, weight: Tensor, bias: Tensor, gelu: bool) -> Tensor:
        return x.new_empty(x.shape)

    @_gradients_op.register_fake
    def _(g: Tensor, x: Tensor, weight: Tensor, bias: Tensor, gelu: bool) -> tuple[Tensor, Tensor, Tensor]:
        return x.new_empty(x.shape), weight.new_empty(weight.shape), bias.new_empty(bias.shape)

    def _save(ctx, inputs, output) -> None:
        x, weight, bias, ctx.gelu = inputs
        ctx.save_for_backward(x, weight, bias)

    def _backward(ctx, g: Tensor):
        return *_gradients_op(g, *ctx.saved_tensors, ctx.gelu), None

    _op.register_autograd(_backward, setup_context=_save)


def depthwise_wide(
    features: Tensor, weight: Tensor, bias: Tensor, gelu: bool = False, taps: Tensor | None = None
) -> Tensor:
    """(gelu) conv(features), features (B, C, H, W), weight (C, 1, K, K) -> (B, C, H, W), all channels-last in memory.

    taps: the weight as `as_taps` lays it out, from whoever has it already; nobody learns from it.
    """
    if torch.compiler.is_compiling():
        return _op(features.permute(0, 2, 3, 1), weight, bias, gelu).permute(0, 3, 1, 2)
    if learns(features, weight, bias):
        return cast(Tensor, _DepthwiseWide.apply(features, weight, bias, gelu))
    taps = as_taps(weight) if taps is None else taps
    return _convolve(_sizes(features, weight), features, taps, bias, gelu)
