"""A stem's first convolution, 3x3 of stride 2 over three colours, as one product that gathers its own pixels.

Three channels suit no product unit, and the library takes eight times as long for them as their bytes do. Here a
program takes a patch of output pixels. It gathers the 27 values under each straight from the picture, whatever its type
and order in memory, multiplies them (with five zeros) by the weight, and adds what stands behind: the bias, and in
inference a GELU and a batch norm with fixed statistics. No cast copy of the pictures is made.

A warp reads the same value of 32 neighbouring pixels at once, and rows of the weight as they lie.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels import HAS_TRITON, in_type, learns
from saccade.kernels.launch import Launch, planned
from saccade.kernels.linear import column_sum
from saccade.kernels.norm_relu import Norm
from saccade.kernels.sizes import parts, power_of_2

WIDEST = 64  # output channels a program can carry


def first_conv_twin(
    images: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype, gelu: bool = False, norm: Norm | None = None
) -> Tensor:
    """norm(gelu(conv(images) + bias)), images (B, 3, H, W) -> (B, N, H/2, W/2) in `dtype`, by the library."""
    features = F.conv2d(images.to(dtype), weight.to(dtype), bias.to(dtype), stride=2, padding=1)
    features = F.gelu(features) if gelu else features
    return features if norm is None else norm.apply(features)


if HAS_TRITON:
    import triton
    import triton.language as tl
    from torch.library import custom_op

    from saccade.kernels.gelu import gelu as _gelu
    from saccade.kernels.norm_relu import _affine, _pointers

    @triton.jit
    def _kernel(
        x_pointer, w_pointer, c_pointer, gain_pointer, shift_pointer, m_pointer, v_pointer, y_pointer,
        height, width, rows, columns, channels, b_step, c_step, y_step, x_step, eps,
        LAST: tl.constexpr, GELU: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """y (B, rows, columns, channels), a patch of ROWS x COLUMNS of it; steps are those of x.

        The 27 values stand in the order of the weight's memory, LAST where that is (N, 3, 3, colours).
        """
        TYPE: tl.constexpr = y_pointer.dtype.element_ty
        strips = tl.cdiv(rows, ROWS)
        image, strip = tl.program_id(0) // strips, tl.program_id(0) % strips
        pixel = tl.arange(0, ROWS * COLUMNS)[:, None]
        row, column = strip * ROWS + pixel // COLUMNS, tl.program_id(1) * COLUMNS + pixel % COLUMNS

        tap = tl.arange(0, 32)[None, :]
        if LAST:
            below, right, colour = tap // 9 - 1, tap // 3 % 3 - 1, tap % 3
        else:
            colour, below, right = tap // 9, tap // 3 % 3 - 1, tap % 3 - 1
        down, across = 2 * row + below, 2 * column + right
        there = (tap < 27) & (down >= 0) & (down < height) & (across >= 0) & (across < width)
        start = x_pointer + image.to(tl.int64) * b_step
        place = 2 * (row * y_step + column * x_step) + (colour * c_step + below * y_step + right * x_step)
        x = tl.load(start + place, mask=there, other=0.0).to(TYPE)

        n = tl.arange(0, CHANNELS)
        known = (n[:, None] < channels) & (tap < 27)
        weight = tl.load(w_pointer + n[:, None] * 27 + tap, mask=known, other=0.0).to(TYPE)
        y = tl.dot(x, tl.trans(weight), input_precision=PRECISION)

        channel = n[None, :]
        held = channel < channels
        y += tl.load(c_pointer + channel, mask=held, other=0.0).to(tl.float32)
        if GELU:
            y = _gelu(y, y_pointer.dtype.element_ty == tl.float32)
        if NORM > 0:
            gain, shift = _affine(gain_pointer, shift_pointer, m_pointer, v_pointer, channel, held, eps, NORM)
            y = y * gain + shift
        inside = (row < rows) & (column < columns) & held
        place = (row * columns + column) * channels + channel
        tl.store(y_pointer + image.to(tl.int64) * rows * columns * channels + place, y.to(TYPE), mask=inside)

    def _tile(channels: int) -> dict[str, int]:
        """Output pixels a program takes, a thread each, and the channels it makes of them."""
        return dict(ROWS=8, COLUMNS=16, CHANNELS=max(16, power_of_2(channels)), num_warps=4)

    @planned
    def _convolving(
        shape: tuple[int, ...], steps: tuple[int, ...], channels: int, eps: float,
        last: bool, gelu: bool, kind: int, exact: bool,
    ) -> Launch:  # fmt: skip
        batch, _, height, width = shape
        rows, columns, tile = parts(height, 2), parts(width, 2), _tile(channels)
        grid = batch * parts(rows, tile["ROWS"]), parts(columns, tile["COLUMNS"])
        numbers = height, width, rows, columns, channels, *steps, eps
        switches = dict(LAST=last, GELU=gelu, NORM=kind, PRECISION="ieee" if exact else "tf32")
        return Launch(_kernel, grid, *numbers, **switches, **tile)

    def _convolve(
        images: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype, gelu: bool, norm: Norm | None
    ) -> Tensor:
        """images (B, 3, H, W) -> (B, H/2, W/2, N)."""
        (batch, _, height, width), channels = images.shape, weight.shape[0]
        y = torch.empty(batch, parts(height, 2), parts(width, 2), channels, dtype=dtype, device=images.device)
        kind, numbers = _pointers(norm, bias)
        last = weight.is_contiguous(memory_format=torch.channels_last)
        weight = weight if last else weight.contiguous()
        eps, exact = 0.0 if norm is None else norm.eps, dtype == torch.float32
        start = _convolving(images.shape, images.stride(), channels, eps, last, gelu, kind, exact)
        start(images, weight, bias, *numbers, y)
        return y

    def _differentiate(g: Tensor, images: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of weight and bias, g (B, H/2, W/2, N): by the library, over pixels cast to its type."""
        g = g.contiguous()
        given = g.permute(0, 3, 1, 2), in_type(images, g.dtype), in_type(weight, g.dtype)
        layout = [2, 2], [1, 1], [1, 1], False, [0, 0], 1
        g_weight = torch.ops.aten.convolution_backward(*given, None, *layout, [False, True, False])[1]
        return in_type(g_weight, weight.dtype), in_type(column_sum(g.flatten(0, 2)), bias.dtype)

    class _FirstConv(torch.autograd.Function):
        @staticmethod
        def forward(ctx, images: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
            ctx.save_for_backward(images, weight, bias)
            return _convolve(images, weight, bias, dtype, False, None).permute(0, 3, 1, 2)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g: Tensor):
            return None, *_differentiate(g.permute(0, 2, 3, 1), *ctx.saved_tensors), None

    def _operate(
        images: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype, gelu: bool, gain: Tensor | None,
        shift: Tensor | None,
    ) -> Tensor:  # fmt: skip
        return _convolve(images, weight, bias, dtype, gelu, None if shift is None else Norm(shift, gain))

    def _gradients(g: Tensor, images: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """The same in the order of memory of weight and bias, as the compiler was told."""
        g_weight, g_bias = _differentiate(g, images, weight, bias)
        return g_weight.contiguous(), g_bias

    _op = custom_op("saccade::first_conv", _operate, mutates_args=())
    _gradients_op = custom_op("saccade::first_conv_backward", _gradients, mutates_args=())

    @_op.register_fake
    def _(
        images: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype, gelu: bool, gain: Tensor | None,
        shift: Tensor | None,
    ) -> Tensor:  # fmt: skip
        batch, _, height, width = images.shape
        return images.new_empty(batch, parts(height, 2), parts(width, 2), weight.shape[0], dtype=dtype)

    @_gradients_op.register_fake
    def _(g: Tensor, images: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return weight.new_empty(weight.shape), bias.new_empty(bias.shape)

    def _save(ctx, inputs, output) -> None:
        images, weight, bias, _, gelu, _, shift = inputs
        ctx.plain = not gelu and shift is None
        ctx.save_for_backward(images, weight, bias)

    def _backward(ctx, g: Tensor):
        assert ctx.plain, "GELU and norm behind the first convolution are for inference"
        return None, *_gradients_op(g, *ctx.saved_tensors), None, None, None, None

    _op.register_autograd(_backward, setup_context=_save)


def first_conv(
    images: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype, gelu: bool = False, norm: Norm | None = None
) -> Tensor:
    """norm(gelu(conv(images) + bias)), images (B, 3, H, W) -> (B, N, H/2, W/2) in `dtype`, channels-last in memory.

    With GELU or norm for inference alone. The pictures get no gradient.
    """
    if torch.compiler.is_compiling():
        gain, shift = (None, None) if norm is None else _as_affine(norm)
        return _op(images, weight, bias, dtype, gelu, gain, shift).permute(0, 3, 1, 2)
    if learns(weight, bias):
        return cast(Tensor, _FirstConv.apply(images, weight, bias, dtype))
    return _convolve(images, weight, bias, dtype, gelu, norm).permute(0, 3, 1, 2)


def _as_affine(norm: Norm) -> tuple[Tensor | None, Tensor]:
    """Gain and shift of a norm, (N,) each in float32."""
    if norm.mean is None or norm.variance is None:
        return norm.weight, norm.bias
    gain = (norm.variance.float() + norm.eps).rsqrt()
    gain = gain if norm.weight is None else gain * norm.weight
    return gain, norm.bias - norm.mean * gain
