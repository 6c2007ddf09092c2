"""Depth-wise 3x3 convolution with its shortcut and its GELU in one pass over a channels-last map.

The library's depth-wise convolutions leave most of the memory's bandwidth unused on channels-last maps, and the sum
around them is one more pass over the widest tensors of SViT and PaCa. Here a program walks down the rows of a strip:
every row is read once for each of its three column shifts, feeds the three output rows it touches, and an output row
is written when its third input row has been seen.

    act ""      y = s x + conv(x)               position encoding
    act "pre"   y = s gelu(x) + conv(gelu(x))   SViT's feed-forward
    act "post"  y = gelu(s x + conv(x))         PaCa's feed-forward

with s = 1 for the shortcut, 0 without it. Only x is kept for the way back; activations are computed again there. The
"pre" GELU is a pass of its own: inside the strip every value would be activated three times, once a shift.
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
    def _read(pointer, row, column, channel, height, width, channels, ok):
        """One tile (columns, channels) of a row, zeros outside the map."""
        row += tl.zeros_like(column)  # a block like the others: the interpreter wants masks of one kind
        inside = ok & (row >= 0) & (row < height) & (column >= 0) & (column < width)
        offset = (row * width + column) * channels + channel
        return tl.load(pointer + offset, mask=inside, other=0.0).to(tl.float32)

    @triton.jit
    def _conv_kernel(
        x_pointer, w_pointer, b_pointer, g_pointer, y_pointer, height, width, channels,
        FLIP: tl.constexpr, POST: tl.constexpr, SLOPE: tl.constexpr, SHORTCUT: tl.constexpr,
        BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """y = (gelu) (s x + conv(x) + b); FLIP turns the kernel round, for the gradient.

        SLOPE 1: multiply by the slope of gelu at g (the gradient through "pre"); 2: y = g * slope of gelu at the
        result (the gradient through "post").
        """
        EXACT: tl.constexpr = y_pointer.dtype.element_ty == tl.float32
        strips = tl.cdiv(height, ROWS)
        image, strip = tl.program_id(0) // strips, tl.program_id(0) % strips
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
        channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        ok = channel < channels
        start = image.to(tl.int64) * height * width * channels
        taps = w_pointer + channel * 9
        if FLIP:
            w00, w01, w02 = tl.load(taps + 8, ok), tl.load(taps + 7, ok), tl.load(taps + 6, ok)
            w10, w11, w12 = tl.load(taps + 5, ok), tl.load(taps + 4, ok), tl.load(taps + 3, ok)
            w20, w21, w22 = tl.load(taps + 2, ok), tl.load(taps + 1, ok), tl.load(taps + 0, ok)
        else:
            w00, w01, w02 = tl.load(taps + 0, ok), tl.load(taps + 1, ok), tl.load(taps + 2, ok)
            w10, w11, w12 = tl.load(taps + 3, ok), tl.load(taps + 4, ok), tl.load(taps + 5, ok)
            w20, w21, w22 = tl.load(taps + 6, ok), tl.load(taps + 7, ok), tl.load(taps + 8, ok)
        w11 = w11.to(tl.float32)
        if SHORTCUT:
            w11 += 1.0
        zero = tl.zeros((COLUMNS, CHANNELS), tl.float32)
        if BIAS:
            zero += tl.load(b_pointer + channel, ok).to(tl.float32)
        first = strip * ROWS
        above, here = zero, zero  # outputs of the rows first - 2 and first - 1: another strip writes those
        for i in tl.static_range(ROWS + 2):
            row = first + i - 1
            left = _read(x_pointer + start, row, column - 1, channel, height, width, channels, ok)
            centre = _read(x_pointer + start, row, column, channel, height, width, channels, ok)
            right = _read(x_pointer + start, row, column + 1, channel, height, width, channels, ok)
            above = above + left * w20  # one product and sum at a time: each is one instruction
            above = above + centre * w21
            above = above + right * w22
            here = here + left * w10
            here = here + centre * w11
            here = here + right * w12
            below = zero + left * w00
            below = below + centre * w01
            below = below + right * w02
            if i >= 2:  # the row above has now seen its three rows
                inside = ok & (row - 1 + tl.zeros_like(column) < height) & (column < width)
                offset = ((row - 1) * width + column) * channels + channel
                y = above
                if POST:
                    y = gelu(y, EXACT)
                if SLOPE == 1:
                    y *= gelu_slope(tl.load(g_pointer + start + offset, mask=inside, other=0.0).to(tl.float32), EXACT)
                if SLOPE == 2:
                    y = tl.load(g_pointer + start + offset, mask=inside, other=0.0).to(tl.float32) * gelu_slope(
                        y, EXACT
                    )
                tl.store(y_pointer + start + offset, y.to(y_pointer.dtype.element_ty), mask=inside)
            above, here = here, below

    @triton.jit
    def _weight_kernel(
        x_pointer, g_pointer, p_pointer, height, width, channels, strips,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """Partial gradients, summed outside, in the order of memory of weight and bias: p (programs, 9 C + C)."""
        image, strip = tl.program_id(0) // strips, tl.program_id(0) % strips
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        ok = channel < channels
        start = image.to(tl.int64) * height * width * channels
        zero = tl.zeros((COLUMNS, CHANNELS), tl.float32)
        p00, p01, p02 = zero, zero, zero
        p10, p11, p12 = zero, zero, zero
        p20, p21, p22 = zero, zero, zero
        bias = zero
        first = strip * ROWS
        last = tl.minimum(first + ROWS, height)
        for left_edge in range(0, width, COLUMNS):
            column = left_edge + tl.arange(0, COLUMNS)[:, None]
            # Gradients of the rows above, at and below the input row: it met their last, middle and first taps.
            above = tl.zeros((COLUMNS, CHANNELS), tl.float32)
            here = tl.zeros((COLUMNS, CHANNELS), tl.float32)
            for row in range(first - 1, last + 1):
                below = _read(g_pointer + start, row + 1, column, channel, last, width, channels, ok)
                left = _read(x_pointer + start, row, column - 1, channel, height, width, channels, ok)
                centre = _read(x_pointer + start, row, column, channel, height, width, channels, ok)
                right = _read(x_pointer + start, row, column + 1, channel, height, width, channels, ok)
                p00 += left * below
                p01 += centre * below
                p02 += right * below
                p10 += left * here
                p11 += centre * here
                p12 += right * here
                p20 += left * above
                p21 += centre * above
                p22 += right * above
                bias += here
                above = here
                here = below
        out = p_pointer + tl.program_id(0).to(tl.int64) * 10 * channels
        taps = out + channel * 9
        tl.store(taps + 0, tl.sum(p00, 0)[None, :], mask=ok)
        tl.store(taps + 1, tl.sum(p01, 0)[None, :], mask=ok)
        tl.store(taps + 2, tl.sum(p02, 0)[None, :], mask=ok)
        tl.store(taps + 3, tl.sum(p10, 0)[None, :], mask=ok)
        tl.store(taps + 4, tl.sum(p11, 0)[None, :], mask=ok)
        tl.store(taps + 5, tl.sum(p12, 0)[None, :], mask=ok)
        tl.store(taps + 6, tl.sum(p20, 0)[None, :], mask=ok)
        tl.store(taps + 7, tl.sum(p21, 0)[None, :], mask=ok)
        tl.store(taps + 8, tl.sum(p22, 0)[None, :], mask=ok)
        tl.store(out + 9 * channels + channel, tl.sum(bias, 0)[None, :], mask=ok)

    def _tile(height: int, width: int, channels: int) -> dict[str, int]:
        """Rows a program walks down, and the columns and channels it carries."""
        return _cut(height, width, channels, columns=4, most=128)

    def _gradient_tile(height: int, width: int, channels: int) -> dict[str, int]:
        """The same for gradients: large maps want more columns, and no more threads to carry them."""
        tile = _cut(height, width, channels, 8, 128) if width > 28 else _cut(height, width, channels, 4, 64)
        return tile | {"num_warps": 2}

    def _cut(height: int, width: int, channels: int, columns: int, most: int) -> dict[str, int]:
        wide = power_of_2(min(most if channels % most == 0 else 64, channels))
        columns = power_of_2(min(columns, width))
        return dict(ROWS=min(7, height), COLUMNS=columns, CHANNELS=wide, num_warps=4 if wide == 128 else 2)

    @planned
    def _convolving(
        batch: int, height: int, width: int, channels: int,
        back: bool, flip: bool, post: bool, slope: int, shortcut: bool, bias: bool,
    ) -> Launch:  # fmt: skip
        tile = (_gradient_tile if back else _tile)(height, width, channels)
        grid = (
            batch * parts(height, tile["ROWS"]),
            parts(width, tile["COLUMNS"]),
            parts(channels, tile["CHANNELS"]),
        )
        switches = dict(FLIP=flip, POST=post, SLOPE=slope, SHORTCUT=shortcut, BIAS=bias)
        return Launch(_conv_kernel, grid, height, width, channels, **switches, **tile)

    @planned
    def _weighing(batch: int, height: int, width: int, channels: int) -> tuple[int, Launch]:
        """Programs that make the gradients of weight and bias, and their launch."""
        tile = _gradient_tile(height, width, channels) | {"ROWS": min(16, height)}
        strips = parts(height, tile["ROWS"])
        grid = (batch * strips, parts(channels, tile["CHANNELS"]))
        return grid[0], Launch(_weight_kernel, grid, height, width, channels, strips, **tile)

    def _convolve(sizes: tuple[int, ...], x: Tensor, weight: Tensor, bias: Tensor, act: int, shortcut: bool) -> Tensor:
        """x, of any shape, in memory as sizes (B, H, W, C) say -> y of that shape."""
        y = torch.empty_like(x)
        source = F.gelu(x) if act == 1 else x
        _convolving(*sizes, False, False, act == 2, 0, shortcut, True)(source, weight, bias, x, y)
        return y

    def _differentiate(
        sizes: tuple[int, ...], g: Tensor, x: Tensor, weight: Tensor, bias: Tensor, act: int, shortcut: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of x, weight and bias; the last two may be parts of one memory."""
        if act == 2:
            behind = torch.empty_like(x)
            _convolving(*sizes, True, False, False, 2, shortcut, True)(x, weight, bias, g, behind)
            g = behind
        g_x = torch.empty_like(x)
        _convolving(*sizes, True, True, False, int(act == 1), shortcut, False)(g, weight, bias, x, g_x)
        programs, weigh = _weighing(*sizes)
        partial = torch.empty(programs, 10 * sizes[3], dtype=torch.float32, device=x.device)
        weigh(F.gelu(x) if act == 1 else x, g, partial)
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
