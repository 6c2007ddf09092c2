"""Depth-wise 3x3 convolution with its shortcut and its GELU in one pass over a channels-last map.

The library's depth-wise convolutions leave most of the memory's bandwidth unused on channels-last maps, and the sum
around them is one more pass over the widest tensors of SViT and PaCa. Here a program walks down the rows of a strip:
every row feeds the three output rows it touches, and an output row is written when its third input row has been seen.
A thread has four neighbouring columns of its channels (a span), for which it reads six: what limits these kernels is
not memory but the number of their instructions.

    act ""      y = s x + conv(x)               position encoding
    act "pre"   y = s gelu(x) + conv(gelu(x))   SViT's feed-forward
    act "post"  y = gelu(s x + conv(x))         PaCa's feed-forward

with s = 1 for the shortcut, 0 without it. Only x is kept for the way back; activations are computed again there. The
"pre" GELU is computed twice for most values, in neighbouring strips and spans; a pass of its own would cost more.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels import HAS_TRITON, allowed, in_type, learns, onednn, suits
from saccade.kernels.launch import Launch, planned, traced
from saccade.kernels.sizes import parts, power_of_2

ACTS = {"": 0, "pre": 1, "post": 2}


def depthwise(features: Tensor, weight: Tensor, bias: Tensor | None, act: str = "", shortcut: bool = True) -> Tensor:
    """features (B, C, H, W), weight (C, 1, 3, 3), bias (C) -> (B, C, H, W), channels-last in memory."""
    layout = features.is_contiguous(memory_format=torch.channels_last)
    name = "depthwise_post" if act == "post" else "depthwise"
    if bias is not None and layout and suits(features) and allowed(name):
        return _fused(features, weight, bias, ACTS[act], shortcut)
    if layout and act != "pre" and onednn.suits(features):
        return onednn.depthwise(features, weight, bias, act == "post", shortcut)
    return depthwise_twin(features, weight, bias, act, shortcut)


def depthwise_twin(
    features: Tensor, weight: Tensor, bias: Tensor | None, act: str = "", shortcut: bool = True
) -> Tensor:
    """The same, by the library."""
    if act == "pre":
        features = F.gelu(features)
    mixed = F.conv2d(features, weight, bias, padding=1, groups=features.shape[1])
    if shortcut:
        mixed = features + mixed
    return F.gelu(mixed) if act == "post" else mixed


if HAS_TRITON:
    import triton
    import triton.language as tl
    from torch.library import triton_op

    from saccade.kernels.gelu import gelu, gelu_slope

    @triton.jit
    def _read(pointer, at, inside, ACTIVE: tl.constexpr, EXACT: tl.constexpr):
        """One column of every span (spans, channels), zeros outside the map."""
        x = tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)
        return gelu(x, EXACT) if ACTIVE else x

    @triton.jit
    def _four_columns(pointer, at, column, width, channels, there, ACTIVE: tl.constexpr, EXACT: tl.constexpr):
        """Those of every span; `at` is where its first one lies."""
        return (
            _read(pointer, at, there & (column < width), ACTIVE, EXACT),
            _read(pointer, at + channels, there & (column + 1 < width), ACTIVE, EXACT),
            _read(pointer, at + 2 * channels, there & (column + 2 < width), ACTIVE, EXACT),
            _read(pointer, at + 3 * channels, there & (column + 3 < width), ACTIVE, EXACT),
        )

    @triton.jit
    def _six_columns(pointer, at, column, width, channels, there, ACTIVE: tl.constexpr, EXACT: tl.constexpr):
        """Those of every span, and its neighbours on both sides."""
        x0 = _read(pointer, at - channels, there & (column > 0) & (column <= width), ACTIVE, EXACT)
        x1, x2, x3, x4 = _four_columns(pointer, at, column, width, channels, there, ACTIVE, EXACT)
        x5 = _read(pointer, at + 4 * channels, there & (column + 4 < width), ACTIVE, EXACT)
        return x0, x1, x2, x3, x4, x5

    @triton.jit
    def _three(total, left, centre, right, w0, w1, w2):
        total = total + left * w0  # one product and sum at a time: each is one instruction
        total = total + centre * w1
        return total + right * w2

    @triton.jit
    def _put(y_pointer, y, g, at, inside, POST: tl.constexpr, SLOPE: tl.constexpr, EXACT: tl.constexpr):
        if POST:
            y = gelu(y, EXACT)
        if SLOPE == 1:
            y *= gelu_slope(g, EXACT)
        if SLOPE == 2:
            y = g * gelu_slope(y, EXACT)
        tl.store(y_pointer + at, y.to(y_pointer.dtype.element_ty), mask=inside)

    @triton.jit
    def _conv_kernel(
        x_pointer, w_pointer, b_pointer, g_pointer, y_pointer, height, width, channels,
        FLIP: tl.constexpr, PRE: tl.constexpr, POST: tl.constexpr, SLOPE: tl.constexpr, SHORTCUT: tl.constexpr,
        BIAS: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, SPANS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """y = (gelu) (s x + conv(x) + b), of gelu(x) with PRE; FLIP turns the kernel round, for the gradient.

        SLOPE 1: multiply by the slope of gelu at g (the gradient through "pre"); 2: y = g * slope of gelu at the
        result (the gradient through "post"). WHOLE: the channels are so many programs' worth, none is left over.
        """
        EXACT: tl.constexpr = y_pointer.dtype.element_ty == tl.float32
        strips = tl.cdiv(height, ROWS)
        image, strip = tl.program_id(0) // strips, tl.program_id(0) % strips
        column = (tl.program_id(1) * SPANS + tl.arange(0, SPANS)[:, None]) * 4  # the first of a span's four
        channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        held = channel < channels
        ok = tl.full((SPANS, CHANNELS), True, tl.int1) if WHOLE else held & (column >= 0)
        start = image.to(tl.int64) * height * width * channels
        x_pointer += start
        y_pointer += start
        g_pointer += start
        taps = w_pointer + channel * 9
        if FLIP:
            w00, w01, w02 = tl.load(taps + 8, held), tl.load(taps + 7, held), tl.load(taps + 6, held)
            w10, w11, w12 = tl.load(taps + 5, held), tl.load(taps + 4, held), tl.load(taps + 3, held)
            w20, w21, w22 = tl.load(taps + 2, held), tl.load(taps + 1, held), tl.load(taps + 0, held)
        else:
            w00, w01, w02 = tl.load(taps + 0, held), tl.load(taps + 1, held), tl.load(taps + 2, held)
            w10, w11, w12 = tl.load(taps + 3, held), tl.load(taps + 4, held), tl.load(taps + 5, held)
            w20, w21, w22 = tl.load(taps + 6, held), tl.load(taps + 7, held), tl.load(taps + 8, held)
        w11 = w11.to(tl.float32)
        if SHORTCUT:
            w11 += 1.0
        zero = tl.zeros((SPANS, CHANNELS), tl.float32)
        if BIAS:
            zero += tl.load(b_pointer + channel, held).to(tl.float32)
        first = strip * ROWS
        a0, a1, a2, a3 = zero, zero, zero, zero  # outputs of the row above the input row
        h0, h1, h2, h3 = zero, zero, zero, zero  # and of its own
        for i in tl.static_range(ROWS + 2):
            row = first + i - 1 + tl.zeros_like(column)  # blocks all: the interpreter wants masks of one kind
            at = (row * width + column) * channels + channel
            there = ok & (row >= 0) & (row < height)
            x0, x1, x2, x3, x4, x5 = _six_columns(x_pointer, at, column, width, channels, there, PRE, EXACT)
            if i >= 2:  # the row above will now have seen its three rows
                at -= width * channels
                there = ok & (row <= height)
                g0, g1, g2, g3 = x0, x1, x2, x3
                if SLOPE > 0:  # asked for early: nothing else can be done while it is on its way
                    g0, g1, g2, g3 = _four_columns(g_pointer, at, column, width, channels, there, False, EXACT)
                a0 = _three(a0, x0, x1, x2, w20, w21, w22)
                a1 = _three(a1, x1, x2, x3, w20, w21, w22)
                a2 = _three(a2, x2, x3, x4, w20, w21, w22)
                a3 = _three(a3, x3, x4, x5, w20, w21, w22)
                _put(y_pointer, a0, g0, at, there & (column < width), POST, SLOPE, EXACT)
                _put(y_pointer, a1, g1, at + channels, there & (column + 1 < width), POST, SLOPE, EXACT)
                _put(y_pointer, a2, g2, at + 2 * channels, there & (column + 2 < width), POST, SLOPE, EXACT)
                _put(y_pointer, a3, g3, at + 3 * channels, there & (column + 3 < width), POST, SLOPE, EXACT)
            if i >= 1 and i <= ROWS:
                h0 = _three(h0, x0, x1, x2, w10, w11, w12)
                h1 = _three(h1, x1, x2, x3, w10, w11, w12)
                h2 = _three(h2, x2, x3, x4, w10, w11, w12)
                h3 = _three(h3, x3, x4, x5, w10, w11, w12)
            a0, a1, a2, a3 = h0, h1, h2, h3
            if i < ROWS:
                h0 = _three(zero, x0, x1, x2, w00, w01, w02)
                h1 = _three(zero, x1, x2, x3, w00, w01, w02)
                h2 = _three(zero, x2, x3, x4, w00, w01, w02)
                h3 = _three(zero, x3, x4, x5, w00, w01, w02)

    @triton.jit
    def _four(total, x0, x1, x2, x3, g0, g1, g2, g3):
        total = total + x0 * g0
        total = total + x1 * g1
        total = total + x2 * g2
        return total + x3 * g3

    @triton.jit
    def _weight_kernel(
        x_pointer, g_pointer, p_pointer, height, width, channels, strips,
        PRE: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, SPANS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """Partial gradients, summed outside, in the order of memory of weight and bias: p (programs, 9 C + C)."""
        EXACT: tl.constexpr = g_pointer.dtype.element_ty == tl.float32
        image, strip = tl.program_id(0) // strips, tl.program_id(0) % strips
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        held = channel < channels
        span = tl.arange(0, SPANS)[:, None] * 4
        ok = tl.full((SPANS, CHANNELS), True, tl.int1) if WHOLE else held & (span >= 0)
        start = image.to(tl.int64) * height * width * channels
        x_pointer += start
        g_pointer += start
        zero = tl.zeros((SPANS, CHANNELS), tl.float32)
        p00, p01, p02 = zero, zero, zero
        p10, p11, p12 = zero, zero, zero
        p20, p21, p22 = zero, zero, zero
        bias = zero
        first = strip * ROWS
        last = tl.minimum(first + ROWS, height)
        for left_edge in range(0, width, 4 * SPANS):
            column = left_edge + span
            # Gradients of the rows above, at and below the input row: it met their last, middle and first taps.
            # Zeros of their own: Triton 3.6 would take an `a` that follows an `h` of the same beginning for a constant.
            a0, a1, a2, a3 = zero, zero, zero, zero
            h0, h1 = tl.zeros((SPANS, CHANNELS), tl.float32), tl.zeros((SPANS, CHANNELS), tl.float32)
            h2, h3 = tl.zeros((SPANS, CHANNELS), tl.float32), tl.zeros((SPANS, CHANNELS), tl.float32)
            for row in range(first - 1, last + 1):
                down = row + tl.zeros_like(column)
                at = (down * width + column) * channels + channel
                there = ok & (down >= 0) & (down < height)
                x0, x1, x2, x3, x4, x5 = _six_columns(x_pointer, at, column, width, channels, there, PRE, EXACT)
                at += width * channels
                there = ok & (down + 1 < last)
                b0, b1, b2, b3 = _four_columns(g_pointer, at, column, width, channels, there, False, EXACT)
                p00 = _four(p00, x0, x1, x2, x3, b0, b1, b2, b3)
                p01 = _four(p01, x1, x2, x3, x4, b0, b1, b2, b3)
                p02 = _four(p02, x2, x3, x4, x5, b0, b1, b2, b3)
                p10 = _four(p10, x0, x1, x2, x3, h0, h1, h2, h3)
                p11 = _four(p11, x1, x2, x3, x4, h0, h1, h2, h3)
                p12 = _four(p12, x2, x3, x4, x5, h0, h1, h2, h3)
                p20 = _four(p20, x0, x1, x2, x3, a0, a1, a2, a3)
                p21 = _four(p21, x1, x2, x3, x4, a0, a1, a2, a3)
                p22 = _four(p22, x2, x3, x4, x5, a0, a1, a2, a3)
                bias += (h0 + h1) + (h2 + h3)
                a0, a1, a2, a3 = h0, h1, h2, h3
                h0, h1, h2, h3 = b0, b1, b2, b3
        out = p_pointer + tl.program_id(0).to(tl.int64) * 10 * channels
        taps = out + channel * 9
        tl.store(taps + 0, tl.sum(p00, 0)[None, :], mask=held)
        tl.store(taps + 1, tl.sum(p01, 0)[None, :], mask=held)
        tl.store(taps + 2, tl.sum(p02, 0)[None, :], mask=held)
        tl.store(taps + 3, tl.sum(p10, 0)[None, :], mask=held)
        tl.store(taps + 4, tl.sum(p11, 0)[None, :], mask=held)
        tl.store(taps + 5, tl.sum(p12, 0)[None, :], mask=held)
        tl.store(taps + 6, tl.sum(p20, 0)[None, :], mask=held)
        tl.store(taps + 7, tl.sum(p21, 0)[None, :], mask=held)
        tl.store(taps + 8, tl.sum(p22, 0)[None, :], mask=held)
        tl.store(out + 9 * channels + channel, tl.sum(bias, 0)[None, :], mask=held)

    def _tile(height: int, width: int, channels: int) -> dict[str, int]:
        """Rows a program walks down, the spans of four columns and the channels it carries."""
        wide = 128 if channels % 128 == 0 else min(64, power_of_2(channels))
        spans = min(max(1, 128 // wide), power_of_2(parts(width, 4)))
        return dict(ROWS=min(7, height), SPANS=spans, CHANNELS=wide, num_warps=1)

    def _slope_tile(height: int, width: int, channels: int) -> dict[str, int]:
        """The same where a gradient is read as well: more threads, to wait together."""
        return _tile(height, width, channels) | {"num_warps": 2}

    def _weight_tile(height: int, width: int, channels: int) -> dict[str, int]:
        """The same for the gradients of weight and bias, whose programs walk over all columns."""
        return _tile(height, width, channels) | {"ROWS": min(8 if width > 28 else 16, height)}

    @planned
    def _convolving(
        batch: int, height: int, width: int, channels: int,
        flip: bool, pre: bool, post: bool, slope: int, shortcut: bool, bias: bool,
    ) -> Launch:  # fmt: skip
        tile = (_slope_tile if slope == 2 else _tile)(height, width, channels)
        grid = (
            batch * parts(height, tile["ROWS"]),
            parts(width, 4 * tile["SPANS"]),
            parts(channels, tile["CHANNELS"]),
        )
        whole = channels % tile["CHANNELS"] == 0
        switches = dict(FLIP=flip, PRE=pre, POST=post, SLOPE=slope, SHORTCUT=shortcut, BIAS=bias, WHOLE=whole)
        return Launch(_conv_kernel, grid, height, width, channels, **switches, **tile)

    @planned
    def _weighing(batch: int, height: int, width: int, channels: int, pre: bool) -> tuple[int, Launch]:
        """Programs that make the gradients of weight and bias, and their launch."""
        tile = _weight_tile(height, width, channels)
        whole = channels % tile["CHANNELS"] == 0
        strips = parts(height, tile["ROWS"])
        grid = (batch * strips, parts(channels, tile["CHANNELS"]))
        return grid[0], Launch(_weight_kernel, grid, height, width, channels, strips, PRE=pre, WHOLE=whole, **tile)

    def _convolve(sizes: tuple[int, ...], x: Tensor, weight: Tensor, bias: Tensor, act: int, shortcut: bool) -> Tensor:
        """x, of any shape, in memory as sizes (B, H, W, C) say -> y of that shape."""
        y = torch.empty_like(x)
        _convolving(*sizes, False, act == 1, act == 2, 0, shortcut, True)(x, weight, bias, x, y)
        return y

    def _differentiate(
        sizes: tuple[int, ...], g: Tensor, x: Tensor, weight: Tensor, bias: Tensor, act: int, shortcut: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of x, weight and bias; the last two may be parts of one memory."""
        if act == 2:
            behind = torch.empty_like(x)
            _convolving(*sizes, False, False, False, 2, shortcut, True)(x, weight, bias, g, behind)
            g = behind
        g_x = torch.empty_like(x)
        _convolving(*sizes, True, False, False, int(act == 1), shortcut, False)(g, weight, bias, x, g_x)
        programs, weigh = _weighing(*sizes, act == 1)
        partial = torch.empty(programs, 10 * sizes[3], dtype=torch.float32, device=x.device)
        weigh(x, g, partial)
        taps, shift = partial.sum(0).split((weight.numel(), bias.numel()))
        return g_x, in_type(taps.view(weight.shape), weight.dtype), in_type(shift, bias.dtype)

    class _Depthwise(torch.autograd.Function):
        """Of maps (B, C, H, W), channels-last: what is no operator needs no views of them."""

        @staticmethod
        def forward(ctx, features: Tensor, weight: Tensor, bias: Tensor, act: int, shortcut: bool) -> Tensor:
            _save(ctx, (features, weight, bias, act, shortcut), None)
            return _convolve(_sizes(features), features, weight, bias, act, shortcut)

        @staticmethod
        def backward(ctx, g: Tensor):
            features, weight, bias = ctx.saved_tensors
            g = g.contiguous(memory_format=torch.channels_last)
            found = _differentiate(_sizes(features), g, features, weight, bias, ctx.act, ctx.shortcut)
            return *found, None, None

    def _sizes(features: Tensor) -> tuple[int, int, int, int]:
        batch, channels, height, width = features.shape
        return batch, height, width, channels

    def _forward(x: Tensor, weight: Tensor, bias: Tensor, act: int, shortcut: bool) -> Tensor:
        """x (B, H, W, C) -> y (B, H, W, C)."""
        return _convolve(x.shape, x, weight, bias, act, shortcut)

    def _gradients(
        g: Tensor, x: Tensor, weight: Tensor, bias: Tensor, act: int, shortcut: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of x, weight and bias, each in a memory of its own, as an operator must hand them over."""
        g_x, g_weight, g_bias = _differentiate(x.shape, g, x, weight, bias, act, shortcut)
        return g_x, g_weight.clone(), g_bias.clone()

    _op = triton_op("saccade::depthwise", traced(_forward), mutates_args={})
    _gradients_op = triton_op("saccade::depthwise_backward", traced(_gradients), mutates_args={})

    def _save(ctx, inputs, output) -> None:
        x, weight, bias, ctx.act, ctx.shortcut = inputs
        ctx.save_for_backward(x, weight, bias)

    def _backward(ctx, g: Tensor):
        x, weight, bias = ctx.saved_tensors
        return *_gradients_op(g.contiguous(), x, weight, bias, ctx.act, ctx.shortcut), None, None

    _op.register_autograd(_backward, setup_context=_save)


def _fused(features: Tensor, weight: Tensor, bias: Tensor, act: int, shortcut: bool) -> Tensor:
    """features (B, C, H, W), channels-last in memory -> (B, C, H, W)."""
    if torch.compiler.is_compiling():
        return _op(features.permute(0, 2, 3, 1), weight, bias, act, shortcut).permute(0, 3, 1, 2)
    if learns(features, weight, bias):
        return _Depthwise.apply(features, weight, bias, act, shortcut)
    return _convolve(_sizes(features), features, weight, bias, act, shortcut)
