"""Depth-wise convolutions with the activation and the sum around them, on channels-last features.

cuDNN's depth-wise kernels leave most of the memory bandwidth unused on channels-last features, and the sum around them
is one more pass over the widest tensors of SViT and PaCa.

3x3: a program steps down the rows of a strip. Each input row feeds the three output rows it touches; an output row is
written after its third input row. A thread has four adjacent columns of its channels (a span) and reads six for them:
the number of instructions limits these kernels, not memory. Only x is saved for backward; activations are recomputed.
The "pre" GELU is computed twice for most values, in adjacent strips and spans; a pass of its own would cost more.

5x5 and 7x7: cuDNN takes five times as long as the 49 multiply-adds per output do, so every value that is read is used
often. A thread has two channels, whose taps are in registers, and a strip of four columns down which it steps: it reads
ten columns of a row while it computes with the row before, and adds each to the seven output rows it touches. Per
output 63 instructions (79 with GELU): 49 multiply-adds, 1.3 loads, 5.6 conversions, half a store. The gradient of x is
the same convolution with flipped taps; the gradient of the weight is cuDNN's.
"""

from collections.abc import Sequence
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.ops import _dispatch as dispatch
from saccade.ops._dispatch import FusedOp, register_op
from saccade.ops._launch import HAS_TRITON, Kernel, cdiv, jit, next_power_of_2, variant
from saccade.ops._rows import channel_unit, column_sum
from saccade.ops._weights import cached_layout

if HAS_TRITON:
    import triton
    import triton.language as tl

    from saccade.ops._gelu import gelu, gelu_derivative

ACTS = {"": 0, "pre": 1, "post": 2}
STRIP_ROWS = 7  # rows that a program of the 3x3 kernels steps down
WIDE_KERNEL_SIZES = (5, 7)
MAX_STRIP_ROWS = 56  # of the wide kernels
MAX_WARPS = 1056  # that a GPU runs at the same time, eight per multiprocessor of an H200: fewer use shorter strips
HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_convolution_pointwise")


def depthwise_conv_reference(
    features: Tensor, weight: Tensor, bias: Tensor | None, act: str = "", shortcut: bool = True
) -> Tensor:
    """3x3 depth-wise convolution of features (B, C, H, W), weight (C, 1, 3, 3).

    act "" is s x + conv(x), "pre" is s gelu(x) + conv(gelu(x)), "post" is gelu(s x + conv(x)); s is 1 with `shortcut`.
    """
    if act == "pre":
        features = F.gelu(features)
    mixed = F.conv2d(features, weight, bias, padding=1, groups=features.shape[1])
    if shortcut:
        mixed = features + mixed
    return F.gelu(mixed) if act == "post" else mixed


if HAS_TRITON:

    @triton.jit
    def _load_column(pointer, mask, PRE: tl.constexpr, EXACT: tl.constexpr):
        """One column of each span (spans, channels), of gelu(x) with PRE; zeros outside the mask."""
        x = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
        return gelu(x, EXACT) if PRE else x

    @triton.jit
    @no_type_check
    def _load_columns(
        pointer, offset, column, width, step, ok, COUNT: tl.constexpr, PRE: tl.constexpr, EXACT: tl.constexpr
    ):
        """COUNT columns from this one on, `step` apart; `offset` is that of the first one."""
        values = ()
        for j in tl.static_range(COUNT):
            at, mask = offset + j * step, ok & (column + j < width)
            values += (_load_column(pointer + at, mask, PRE, EXACT),)
        return values

    @triton.jit
    @no_type_check
    def _load_six(pointer, offset, column, width, step, ok, PRE: tl.constexpr, EXACT: tl.constexpr):
        """The four columns of each span and one more on both sides."""
        at, mask = offset - step, ok & (column > 0) & (column <= width)
        left = _load_column(pointer + at, mask, PRE, EXACT)
        return (left,) + _load_columns(pointer, offset, column, width, step, ok, 5, PRE, EXACT)  # noqa: RUF005

    @triton.jit
    @no_type_check
    def _add_taps(sums, x, taps, ROW: tl.constexpr):
        """The sums of the columns of a span, plus six columns of the input multiplied by one row of taps."""
        added = ()
        for c in tl.static_range(4):
            y = sums[c]
            for k in tl.static_range(3):
                y = y + x[c + k] * taps[3 * ROW + k]  # one product and sum at a time: each is one instruction
            added += (y,)
        return added

    @triton.jit
    def _store_column(y_ptr, y, g, offset, mask, GELU: tl.constexpr, DERIVATIVE: tl.constexpr, EXACT: tl.constexpr):
        if GELU:
            y = gelu(y, EXACT)
        if DERIVATIVE == 1:
            y *= gelu_derivative(g, EXACT)
        if DERIVATIVE == 2:
            y = g * gelu_derivative(y, EXACT)
        tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)

    @jit
    @no_type_check
    def _depthwise_kernel(
        x_ptr, weight_ptr, bias_ptr, g_ptr, y_ptr, height, width, units,
        UNIT: tl.constexpr, FLIP: tl.constexpr, PRE: tl.constexpr, POST: tl.constexpr, DERIVATIVE: tl.constexpr,
        SHORTCUT: tl.constexpr, BIAS: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr, SPANS: tl.constexpr,
        CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """y = (gelu) (s x + conv(x) + b), of gelu(x) with PRE; FLIP reverses the taps, for the gradient.

        DERIVATIVE 1: multiply by the derivative of gelu at g (gradient of "pre"); 2: y = g * derivative of gelu at the
        result (gradient of "post"). FULL: the number of channels is a multiple of CHANNELS.
        """
        EXACT: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
        channels = units * UNIT
        strips = tl.cdiv(height, ROWS)
        image, strip = tl.program_id(0) // strips, tl.program_id(0) % strips
        column = (tl.program_id(1) * SPANS + tl.arange(0, SPANS)[:, None]) * 4  # the first of a span
        channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        in_range = channel < channels
        ok = tl.full((SPANS, CHANNELS), True, tl.int1) if FULL else in_range & (column >= 0)
        start = image.to(tl.int64) * height * width * channels
        x_ptr += start
        y_ptr += start
        g_ptr += start
        taps = ()
        for k in tl.static_range(9):
            tap = tl.load(weight_ptr + channel * 9 + (8 - k if FLIP else k), in_range).to(tl.float32)
            taps += (tap,)
        if SHORTCUT:
            taps = taps[:4] + (taps[4] + 1.0,) + taps[5:]  # noqa: RUF005 (kernels have no starred tuples)
        zero = tl.zeros((SPANS, CHANNELS), tl.float32)
        if BIAS:
            zero += tl.load(bias_ptr + channel, in_range).to(tl.float32)
        zeros = zero, zero, zero, zero
        first = strip * ROWS
        upper, middle = zeros, zeros  # outputs of the row above the input row, and of the row itself
        for i in tl.static_range(ROWS + 2):
            row = first + i - 1 + tl.zeros_like(column)  # a block: the interpreter needs masks of one kind
            offset = (row * width + column) * channels + channel
            valid = ok & (row >= 0) & (row < height)
            x = _load_six(x_ptr, offset, column, width, channels, valid, PRE, EXACT)
            if i >= 2:  # completes the row above
                offset -= width * channels
                valid = ok & (row <= height)
                g = x
                if DERIVATIVE > 0:  # loaded early, to hide the latency
                    g = _load_columns(g_ptr, offset, column, width, channels, valid, 4, False, EXACT)
                upper = _add_taps(upper, x, taps, 2)
                for c in tl.static_range(4):
                    if c == 2:  # with c * channels, addresses shared with the loads would take ten more registers
                        offset += 2 * channels
                    at, mask = offset + c % 2 * channels, valid & (column + c < width)
                    _store_column(y_ptr, upper[c], g[c], at, mask, POST, DERIVATIVE, EXACT)
            if i >= 1 and i <= ROWS:
                middle = _add_taps(middle, x, taps, 1)
            upper = middle
            if i < ROWS:
                middle = _add_taps(zeros, x, taps, 0)

    @jit
    @no_type_check
    def _weight_gradient_kernel(
        x_ptr, g_ptr, partial_ptr, height, width, units, rows, strips,
        UNIT: tl.constexpr, PRE: tl.constexpr, FULL: tl.constexpr, SPANS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """Partial gradients in the memory order of weight and bias: partial (programs, 9 C + C)."""
        EXACT: tl.constexpr = g_ptr.dtype.element_ty == tl.float32
        channels = units * UNIT
        image, strip = tl.program_id(0) // strips, tl.program_id(0) % strips
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        in_range = channel < channels
        span = tl.arange(0, SPANS)[:, None] * 4
        ok = tl.full((SPANS, CHANNELS), True, tl.int1) if FULL else in_range & (span >= 0)
        start = image.to(tl.int64) * height * width * channels
        x_ptr += start
        g_ptr += start
        zero = tl.zeros((SPANS, CHANNELS), tl.float32)
        sums = ()
        for _ in tl.static_range(9):
            sums += (zero,)
        bias = zero
        first = strip * rows
        last = tl.minimum(first + rows, height)
        for left_edge in range(0, width, 4 * SPANS):
            column = left_edge + span
            # Gradients of the rows above and at the input row. Separate zeros: Triton 3.6 compiles a loop variable that
            # takes the value of another one with the same initial value as a constant.
            previous = zero, zero, zero, zero
            for _ in tl.static_range(4):
                previous += (tl.zeros((SPANS, CHANNELS), tl.float32),)
            for row in range(first - 1, last + 1):
                row_block = row + tl.zeros_like(column)
                offset = (row_block * width + column) * channels + channel
                valid = ok & (row_block >= 0) & (row_block < height)
                x = _load_six(x_ptr, offset, column, width, channels, valid, PRE, EXACT)
                offset += width * channels
                valid = ok & (row_block + 1 < last)
                g = previous + _load_columns(g_ptr, offset, column, width, channels, valid, 4, False, EXACT)
                added = ()
                for k in tl.static_range(9):
                    total = sums[k]
                    for c in tl.static_range(4):
                        total = total + x[c + k % 3] * g[8 - k // 3 * 4 + c]
                    added += (total,)
                sums = added
                bias += (g[4] + g[5]) + (g[6] + g[7])
                previous = g[4:]
        out = partial_ptr + tl.program_id(0).to(tl.int64) * 10 * channels
        for k in tl.static_range(9):
            tl.store(out + channel * 9 + k, tl.sum(sums[k], 0)[None, :], mask=in_range)
        tl.store(out + 9 * channels + channel, tl.sum(bias, 0)[None, :], mask=in_range)


def _tile(channels: int) -> dict[str, Any]:
    """Spans of four columns and channels of a program, one warp."""
    wide = 128 if channels % 128 == 0 else min(64, next_power_of_2(channels))
    full = channels % wide == 0
    return dict(UNIT=channel_unit(channels), FULL=full, SPANS=max(1, 128 // wide), CHANNELS=wide, num_warps=1)


@variant
def _depthwise(channels: int, flip: bool, act: int, derivative: int, shortcut: bool, bias: bool) -> Kernel:
    tile = _tile(channels) | dict(ROWS=STRIP_ROWS)
    if derivative == 2:
        tile["num_warps"] = 2  # reads a gradient too: more threads hide its latency
    flags = dict(FLIP=flip, PRE=act == 1, POST=act == 2, DERIVATIVE=derivative, SHORTCUT=shortcut, BIAS=bias)
    return Kernel(_depthwise_kernel, **flags, **tile)


@variant
def _weight_gradient(channels: int, pre: bool) -> Kernel:
    return Kernel(_weight_gradient_kernel, PRE=pre, **_tile(channels))


def _run_depthwise(kernel: Kernel, sizes: Sequence[int], *tensors: Tensor) -> None:
    batch, height, width, channels = sizes
    tile = kernel.constants
    columns, across = cdiv(width, 4 * tile["SPANS"]), cdiv(channels, tile["CHANNELS"])
    kernel((batch * cdiv(height, STRIP_ROWS), columns, across), *tensors, height, width, channels // tile["UNIT"])


def depthwise_forward(
    sizes: Sequence[int], x: Tensor, weight: Tensor, bias: Tensor, act: int, shortcut: bool
) -> Tensor:
    """`depthwise_conv` of x, of any shape, in memory as sizes (B, H, W, C); act is a value of `ACTS`."""
    y = torch.empty_like(x)
    _run_depthwise(_depthwise(sizes[3], False, act, 0, shortcut, True), sizes, x, weight, bias, x, y)
    return y


def depthwise_gradients(
    sizes: Sequence[int], g: Tensor, x: Tensor, weight: Tensor, bias: Tensor, act: int, shortcut: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias of `depthwise_forward`; the last two may share memory."""
    g_x, g_parameters = _depthwise_gradients(sizes, g, x, weight, bias, act, shortcut)
    return g_x, *_split(g_parameters, weight, bias)


def _depthwise_gradients(
    sizes: Sequence[int], g: Tensor, x: Tensor, weight: Tensor, bias: Tensor, act: int, shortcut: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x, and of weight and bias (10 C) in float32."""
    batch, height, width, channels = sizes
    if act == 2:
        g_sum = torch.empty_like(x)
        _run_depthwise(_depthwise(channels, False, 0, 2, shortcut, True), sizes, x, weight, bias, g, g_sum)
        g = g_sum
    g_x = torch.empty_like(x)
    _run_depthwise(_depthwise(channels, True, 0, int(act == 1), shortcut, False), sizes, g, weight, bias, x, g_x)
    kernel = _weight_gradient(channels, act == 1)
    rows = 8 if width > 28 else 16
    strips, tile = cdiv(height, rows), kernel.constants
    partial = torch.empty(batch * strips, 10 * channels, dtype=torch.float32, device=x.device)
    grid = batch * strips, cdiv(channels, tile["CHANNELS"])
    kernel(grid, x, g, partial, height, width, channels // tile["UNIT"], rows, strips)
    return g_x, column_sum(partial)


def _split(g_parameters: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    taps, g_bias = g_parameters.split((weight.numel(), bias.numel()))
    return dispatch.cast(taps.view(weight.shape), weight.dtype), dispatch.cast(g_bias, bias.dtype)


def _sizes(features: Tensor) -> tuple[int, int, int, int]:
    batch, channels, height, width = features.shape
    return batch, height, width, channels


def _forward(features: Tensor, weight: Tensor, bias: Tensor, act: int, shortcut: bool) -> Tensor:
    features = features.contiguous(memory_format=torch.channels_last)
    return depthwise_forward(_sizes(features), features, weight.contiguous(), bias, act, shortcut)


def _gradients(
    g: Tensor, features: Tensor, weight: Tensor, bias: Tensor, act: int, shortcut: bool
) -> tuple[Tensor, Tensor]:
    features = features.contiguous(memory_format=torch.channels_last)
    g = dispatch.cast(g, features.dtype).contiguous(memory_format=torch.channels_last)
    return _depthwise_gradients(_sizes(features), g, features, weight.contiguous(), bias, act, shortcut)


def _backward(ctx: Any, gradients: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    features, weight, bias = ctx.saved_tensors
    g_x, g_parameters = gradients(g, features, weight, bias, *ctx.options)
    return g_x, *_split(g_parameters, weight, bias), None, None


_depthwise_conv = FusedOp("depthwise_conv", _forward, _gradients, backward=_backward)


def _supports_depthwise(
    features: Tensor, weight: Tensor, bias: Tensor | None, act: str = "", shortcut: bool = True
) -> bool:
    return bias is not None and dispatch.on_gpu(features) and dispatch.is_channels_last(features)


@register_op("depthwise_conv", reference=depthwise_conv_reference, supports=_supports_depthwise)
def depthwise_conv(
    features: Tensor, weight: Tensor, bias: Tensor | None, act: str = "", shortcut: bool = True
) -> Tensor:
    return _depthwise_conv(features, weight, bias, ACTS[act], shortcut)


def _supports_onednn(
    features: Tensor, weight: Tensor, bias: Tensor | None, act: str = "", shortcut: bool = True
) -> bool:
    usable = HAS_ONEDNN and act != "pre" and dispatch.on_cpu_inference(features)
    return usable and dispatch.is_channels_last(features)


@depthwise_conv.add("onednn", _supports_onednn)
def depthwise_onednn(
    features: Tensor, weight: Tensor, bias: Tensor | None, act: str = "", shortcut: bool = True
) -> Tensor:
    """oneDNN's convolution with the GELU fused; the sum is a 1 on the middle tap."""
    if shortcut:
        weight = weight.clone()
        weight[:, :, 1, 1] += 1
    fused = ("gelu", [], "none") if act == "post" else ("none", [], "")
    sizes = [1, 1], [1, 1], [1, 1], features.shape[1]
    return torch.ops.mkldnn._convolution_pointwise(features, weight, bias, *sizes, *fused)


# Convolutions of 5x5 and 7x7 with GELU.


def depthwise_gelu_reference(features: Tensor, conv: nn.Module) -> Tensor:
    """gelu(conv(features)), features (B, C, H, W), conv depth-wise, of any kernel size."""
    return F.gelu(conv(features))


if HAS_TRITON:

    @triton.jit
    @no_type_check
    def _load_row(pointer, column, width, ok, DIM: tl.constexpr, COUNT: tl.constexpr):
        """COUNT columns from this one on, zeros outside the features."""
        values = ()
        for j in tl.static_range(COUNT):
            mask = ok & (column + j >= 0) & (column + j < width)
            values += (_load_column(pointer + j * DIM, mask, False, True),)
        return values

    @triton.jit
    @no_type_check
    def _store_columns(
        y_ptr, g_ptr, sums, column, width, ok,
        FIRST: tl.constexpr, GELU: tl.constexpr, DERIVATIVE: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """A row of outputs, which are in `sums` from FIRST on."""
        EXACT: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
        for c in tl.static_range(COLUMNS):
            y, mask = sums[FIRST + c], ok & (column + c < width)
            g = tl.load(g_ptr + c * DIM, mask=mask, other=0.0).to(tl.float32) if DERIVATIVE else y
            _store_column(y_ptr, y, g, c * DIM, mask, GELU, 2 if DERIVATIVE else 0, EXACT)

    @jit
    @no_type_check
    def _wide_kernel(
        x_ptr, taps_ptr, bias_ptr, g_ptr, y_ptr, height, width, rows,
        DIM: tl.constexpr, SIDE: tl.constexpr, FLIP: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr,
        DERIVATIVE: tl.constexpr, COLUMNS: tl.constexpr, STRIPS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """y = (gelu) (conv(x) + b); FLIP reverses the taps; DERIVATIVE: y = g * derivative of gelu at the result.

        A program has STRIPS strips of COLUMNS columns each, CHANNELS of the DIM channels, and `rows` rows.
        """
        HALF: tl.constexpr = SIDE // 2
        COUNT: tl.constexpr = COLUMNS + SIDE - 1
        runs = tl.cdiv(height, rows)
        image, first = tl.program_id(0) // runs, tl.program_id(0) % runs * rows
        column = (tl.program_id(1) * STRIPS + tl.arange(0, STRIPS)[:, None]) * COLUMNS
        channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        ok = channel < DIM
        zero = tl.zeros((STRIPS, CHANNELS), tl.float32)
        taps = ()
        for k in tl.static_range(SIDE * SIDE):
            tap = tl.load(taps_ptr + (SIDE * SIDE - 1 - k if FLIP else k) * DIM + channel, mask=ok, other=0.0)
            taps += (zero + tap.to(tl.float32),)
        if BIAS:
            zero += tl.load(bias_ptr + channel, mask=ok, other=0.0).to(tl.float32)
        sums = ()  # of the output rows from HALF above the input row to HALF - 1 below it
        for _ in tl.static_range((SIDE - 1) * COLUMNS):
            sums += (zero,)

        begin, end = tl.maximum(first - HALF, 0), tl.minimum(first + rows + HALF, height)
        last = tl.minimum(first + rows, height)
        start = image.to(tl.int64) * height * width * DIM
        x_ptr, g_ptr, y_ptr = x_ptr + start, g_ptr + start, y_ptr + start
        source, target = (column - HALF) * DIM + channel, column * DIM + channel
        next_row = _load_row(x_ptr + (begin * width * DIM + source), column - HALF, width, ok, DIM, COUNT)
        for row in range(begin, end):
            x, below = next_row, tl.minimum(row + 1, end - 1)
            next_row = _load_row(x_ptr + (below * width * DIM + source), column - HALF, width, ok, DIM, COUNT)
            added = ()
            for r in tl.static_range(SIDE):
                for c in tl.static_range(COLUMNS):
                    y = zero
                    if r < SIDE - 1:
                        y = sums[r * COLUMNS + c]
                    for k in tl.static_range(SIDE):
                        y = tl.fma(x[c + k], taps[(SIDE - 1 - r) * SIDE + k], y)
                    added += (y,)
            done = row - HALF  # the output row that is now complete
            if done >= first:
                place = done * width * DIM + target
                _store_columns(
                    y_ptr + place, g_ptr + place, added, column, width, ok, 0, GELU, DERIVATIVE, DIM, COLUMNS
                )
            sums = added[COLUMNS:]
        for r in tl.static_range(HALF):  # output rows at the lower edge, which have no more input rows below
            done = end - HALF + r
            if (done >= first) & (done < last):
                place = done * width * DIM + target
                y_row, g_row = y_ptr + place, g_ptr + place
                _store_columns(y_row, g_row, sums, column, width, ok, r * COLUMNS, GELU, DERIVATIVE, DIM, COLUMNS)


@variant
def _wide(channels: int, side: int, flip: bool, gelu: bool, derivative: bool, warps: int) -> Kernel:
    """A thread has two channels of a strip."""
    wide = 64 if channels % 64 == 0 else min(32, next_power_of_2(channels))
    flags = dict(SIDE=side, FLIP=flip, BIAS=not flip, GELU=gelu, DERIVATIVE=derivative)
    tile = dict(COLUMNS=4, STRIPS=64 // wide * warps, CHANNELS=wide, num_warps=warps)
    return Kernel(_wide_kernel, DIM=channels, **flags, **tile)


def _run_wide(features: Tensor, side: int, flip: bool, gelu: bool, derivative: bool, *tensors: Tensor) -> None:
    """One warp per program, or two or four where strips cover the width without remainder."""
    batch, channels, height, width = features.shape
    strips = _wide(channels, side, flip, gelu, derivative, 1).constants["STRIPS"]
    blocks = cdiv(width, 4 * strips)
    warps = 4 if blocks % 4 == 0 else 2 if blocks % 2 == 0 else 1
    kernel = _wide(channels, side, flip, gelu, derivative, warps)
    columns, across = blocks // warps, cdiv(channels, kernel.constants["CHANNELS"])
    runs = MAX_WARPS // max(1, batch * warps * columns * across)
    runs = max(cdiv(height, MAX_STRIP_ROWS), min(cdiv(height, 7), runs))
    rows = cdiv(height, runs)
    kernel((batch * cdiv(height, rows), columns, across), *tensors, height, width, rows)


def _taps(weight: Tensor) -> Tensor:
    """weight (C, 1, K, K) -> (K K, C): one tap of all channels is contiguous."""
    return weight.flatten(1).t().contiguous()


def _wide_forward(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    features = features.contiguous(memory_format=torch.channels_last)
    y, taps = torch.empty_like(features), cached_layout(weight, "taps", lambda: _taps(weight))
    _run_wide(features, weight.shape[2], False, True, False, features, taps, bias, features, y)
    return y


def _wide_gradients(g: Tensor, features: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    channels, side, taps = features.shape[1], weight.shape[2], _taps(weight)
    features = features.contiguous(memory_format=torch.channels_last)
    g = dispatch.cast(g, features.dtype).contiguous(memory_format=torch.channels_last)
    g_mixed, g_x = torch.empty_like(features), torch.empty_like(features)
    _run_wide(features, side, False, False, True, features, taps, bias, g, g_mixed)
    _run_wide(features, side, True, False, False, g_mixed, taps, bias, features, g_x)
    layout = [1, 1], [side // 2, side // 2], [1, 1], False, [0, 0], channels
    inputs = g_mixed, features, dispatch.cast(weight, features.dtype), None
    g_weight = torch.ops.aten.convolution_backward(*inputs, *layout, [False, True, False])[1]
    g_bias = column_sum(g_mixed.permute(0, 2, 3, 1).view(-1, channels))
    return g_x, g_weight.to(weight.dtype, memory_format=torch.contiguous_format), dispatch.cast(g_bias, bias.dtype)


_depthwise_gelu = FusedOp("depthwise_gelu", _wide_forward, _wide_gradients)


def _supports_wide(features: Tensor, conv: nn.Module) -> bool:
    """5x5 or 7x7, with a bias and zero padding that keeps the size."""
    if not dispatch.on_gpu(features) or type(conv) is not nn.Conv2d or not dispatch.is_plain(conv):
        return False
    side = conv.kernel_size[0]
    shape = (conv.kernel_size, conv.stride, conv.dilation) == ((side, side), (1, 1), (1, 1))
    same_size = conv.padding == (side // 2, side // 2) and conv.padding_mode == "zeros"
    is_depthwise = conv.groups == conv.in_channels == conv.out_channels and conv.bias is not None
    return side in WIDE_KERNEL_SIZES and shape and same_size and is_depthwise and dispatch.is_channels_last(features)


@register_op("depthwise_gelu", reference=depthwise_gelu_reference, supports=_supports_wide)
def depthwise_gelu(features: Tensor, conv: nn.Module) -> Tensor:
    return _depthwise_gelu(dispatch.cast(features, dispatch.compute_dtype(features)), conv.weight, conv.bias)
