"""Dense convolutions with the bias, norm, activation and sum that follow them, and the first convolutions of stems.

PyTorch adds a convolution's bias in a pass of its own at half the memory bandwidth, then runs one pass each for norm,
activation, sum and ReLU. In eager inference on a GPU these are one kernel here, in place on the output of the
convolution; or part of cuDNN's convolution, where norms are folded into the weights. Under torch.compile Inductor fuses
what follows a convolution; norms are then folded at every call, which reads the weights once more and saves a pass over
all features. In eager training the norm and what follows it is `batch_norm.norm_act`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.ops import _dispatch as dispatch
from saccade.ops import _rows as rows_of
from saccade.ops._dispatch import FusedOp, register_op
from saccade.ops._launch import HAS_TRITON, Kernel, cdiv, jit, next_power_of_2, variant
from saccade.ops._weights import cached_layout, cast_weight, cast_weights, has_casts
from saccade.ops.batch_norm import ACTIVATIONS, norm_act

if HAS_TRITON:
    import triton
    import triton.language as tl

    from saccade.ops._gelu import gelu
    from saccade.ops._rows import row_tile

MAX_CUDNN_SIZE = 2**31  # values of the features; PyTorch splits larger batches, but not for the fused convolutions
MAX_FIRST_CHANNELS = 64  # output channels of the first convolution
BLOCK_COLUMNS = 64


def conv_reference(features: Tensor, layer: nn.Module) -> Tensor:
    """layer(features), features (B, C, H, W), the layer a convolution."""
    return layer(features)


def conv_norm_act_reference(
    features: Tensor, layer: nn.Module, norm: nn.Module, act: str = "", shortcut: Tensor | None = None,
    shortcut_layers: nn.Sequential | None = None, drop_path: nn.Module | None = None, *, pre_act: str = "",
) -> Tensor:  # fmt: skip
    """act(drop_path(norm(pre_act(layer(features)))) + shortcut_layers(shortcut)), features (B, C, H, W)."""
    features = norm(ACTIVATIONS[pre_act](layer(features)))
    if drop_path is not None:
        features = drop_path(features)
    if shortcut is not None:
        features = features + (shortcut if shortcut_layers is None else shortcut_layers(shortcut))
    return ACTIVATIONS[act](features)


# What follows a convolution, as one kernel.


class FixedNorm(NamedTuple):
    """A norm with fixed statistics: nothing, a bias (C), bias and weight, or these with mean and variance."""

    bias: Tensor | None = None
    weight: Tensor | None = None
    mean: Tensor | None = None
    variance: Tensor | None = None
    eps: float = 0.0

    def arguments(self, unused: Tensor) -> tuple[int, list[Tensor], float]:
        """NORM, the four tensors and EPS of `affine_of_norm`; `unused` in place of tensors that it does not read."""
        tensors = [x for x in (self.bias, self.weight, self.mean, self.variance) if x is not None]
        return len(tensors), tensors + [unused] * (4 - len(tensors)), self.eps


NO_NORM = FixedNorm()

if HAS_TRITON:

    @triton.jit
    def affine_of_norm(bias_ptr, weight_ptr, mean_ptr, var_ptr, channel, valid, EPS: tl.constexpr, NORM: tl.constexpr):
        """Gain and shift per channel of a `FixedNorm` with NORM tensors."""
        shift = tl.zeros_like(channel).to(tl.float32)
        gain = shift + 1.0
        if NORM > 0:
            shift = tl.load(bias_ptr + channel, mask=valid, other=0.0).to(tl.float32)
        if NORM > 1:
            gain = tl.load(weight_ptr + channel, mask=valid, other=0.0).to(tl.float32)
        if NORM > 2:
            gain *= tl.rsqrt(tl.load(var_ptr + channel, mask=valid, other=1.0).to(tl.float32) + EPS)
            shift -= tl.load(mean_ptr + channel, mask=valid, other=0.0).to(tl.float32) * gain
        return gain, shift

    @jit
    def _epilogue_kernel(
        x_ptr, conv_bias_ptr, bias_ptr, weight_ptr, mean_ptr, var_ptr,
        s_ptr, s_bias_ptr, s_weight_ptr, s_mean_ptr, s_var_ptr, rows, units,
        UNIT: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
        SHORTCUT: tl.constexpr, S_NORM: tl.constexpr, S_EPS: tl.constexpr, RELU: tl.constexpr,
        ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """x = relu(norm(gelu(x + bias)) + s_norm(s)), in place."""
        channels = units * UNIT
        channel, valid, offset, mask = row_tile(rows, channels, ROWS, CHANNELS)
        x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        if BIAS:
            x += tl.load(conv_bias_ptr + channel, mask=valid, other=0.0).to(tl.float32)
        if GELU:
            x = gelu(x, x_ptr.dtype.element_ty == tl.float32)
        gain, shift = affine_of_norm(bias_ptr, weight_ptr, mean_ptr, var_ptr, channel, valid, EPS, NORM)
        x = x * gain + shift
        if SHORTCUT:
            s = tl.load(s_ptr + offset, mask=mask, other=0.0).to(tl.float32)
            gain, shift = affine_of_norm(s_bias_ptr, s_weight_ptr, s_mean_ptr, s_var_ptr, channel, valid, S_EPS, S_NORM)
            x += s * gain + shift
        if RELU:
            x = tl.where(x < 0, 0.0, x)  # unlike a maximum, propagates NaN
        tl.store(x_ptr + offset, x.to(x_ptr.dtype.element_ty), mask=mask)


@variant
def _epilogue(
    channels: int, bias: bool, gelu: bool, norm: int, eps: float, shortcut: bool, s_norm: int, s_eps: float, relu: bool
) -> Kernel:
    constants = dict(BIAS=bias, GELU=gelu, NORM=norm, EPS=eps)
    constants |= dict(SHORTCUT=shortcut, S_NORM=s_norm, S_EPS=s_eps, RELU=relu)
    return Kernel(_epilogue_kernel, **constants, **rows_of.tile_of(channels))


def epilogue(
    x: Tensor, bias: Tensor | None, gelu: bool = False, norm: FixedNorm = NO_NORM, shortcut: Tensor | None = None,
    shortcut_norm: FixedNorm = NO_NORM, relu: bool = False,
) -> Tensor:  # fmt: skip
    """relu(norm(gelu(x + bias)) + shortcut_norm(shortcut)), written over x (B, C, H, W) where it is channels-last."""
    x, channels = x.contiguous(memory_format=torch.channels_last), x.shape[1]
    shortcut = None if shortcut is None else shortcut.contiguous(memory_format=torch.channels_last)
    kind, tensors, eps = norm.arguments(x)
    s_kind, s_tensors, s_eps = shortcut_norm.arguments(x)
    kernel = _epilogue(channels, bias is not None, gelu, kind, eps, shortcut is not None, s_kind, s_eps, relu)
    rows = x.numel() // channels
    inputs = x if bias is None else bias, *tensors, x if shortcut is None else shortcut, *s_tensors
    kernel(rows_of.row_grid(kernel, rows, channels), x, *inputs, rows, channels // kernel.constants["UNIT"])
    return x


def fixed_norm(norm: Any, bias: Tensor | None = None) -> FixedNorm:
    """The norm of features + bias, by its tensors.

    Besides BatchNorm, a plain layer with attributes `gain` and `shift` (gain x + shift) is one, and nn.Identity, which
    is what folding a norm leaves.
    """
    if isinstance(norm, nn.Identity):
        return FixedNorm(bias)
    if isinstance(norm, nn.BatchNorm2d):
        mean = norm.running_mean if bias is None or norm.running_mean is None else norm.running_mean - bias
        return FixedNorm(norm.bias, norm.weight, mean, norm.running_var, norm.eps)
    gain, shift = norm.gain.flatten(), norm.shift.flatten()
    return FixedNorm(shift if bias is None else shift + gain * bias, gain)


def is_fixed_norm(norm: nn.Module) -> bool:
    """Whether `fixed_norm` applies."""
    if not dispatch.is_plain(norm):
        return False
    if isinstance(norm, nn.BatchNorm2d):
        return not norm.training and norm.affine and norm.running_mean is not None
    return isinstance(norm, nn.Identity) or hasattr(norm, "gain")


def is_eager_inference(features: Tensor, convs: Sequence[nn.Module], norms: Sequence[nn.Module]) -> bool:
    """Whether kernels may compute what follows these convolutions: eager inference on a GPU, fixed norms, no hooks."""
    if not dispatch.on_gpu(features) or dispatch.is_training() or dispatch.is_compiling():
        return False
    plain = all(type(conv) is nn.Conv2d for conv in convs) and dispatch.is_plain(*convs)
    return plain and all(map(is_fixed_norm, norms))


def convolve(features: Tensor, conv: nn.Conv2d) -> Tensor:
    """conv(features) without the bias."""
    if is_stem_conv(features, conv):
        return _convolve_blocks(features, conv)
    return conv._conv_forward(features, cast_weight(conv.weight), None)


# cuDNN's convolution with bias, sum and ReLU. After a 1x1 convolution to many channels a separate pass takes longer
# than the convolution.


def _fake_cudnn(features: Tensor, weight: Tensor, *options: Any) -> Tensor:
    """The last options are stride, padding, dilation and groups."""
    shaped = F.conv2d(features, weight, None, *options[-4:])
    return torch.empty_like(shaped, memory_format=torch.channels_last)


for _name in ("cudnn_convolution_relu", "cudnn_convolution_add_relu"):
    dispatch.register_aten_fake(_name, _fake_cudnn)


def _cudnn_conv_relu(
    features: Tensor, weight: Tensor, bias: Tensor, conv: nn.Conv2d, shortcut: Tensor | None
) -> Tensor:
    """relu(conv(features) + bias + shortcut), with this weight."""
    features = features.contiguous(memory_format=torch.channels_last)
    sizes = conv.stride, conv.padding, conv.dilation, 1
    if shortcut is None:
        return torch.ops.aten.cudnn_convolution_relu(features, weight, bias, *sizes)
    shortcut = shortcut.contiguous(memory_format=torch.channels_last)
    return torch.ops.aten.cudnn_convolution_add_relu(features, weight, shortcut, 1.0, bias, *sizes)


def _can_use_cudnn(features: Tensor, conv: nn.Conv2d) -> bool:
    """Zero padding, one group, channels in multiples of 8."""
    if not dispatch.can_use_cudnn(features) or conv.groups != 1:
        return False
    if conv.padding_mode != "zeros" or isinstance(conv.padding, str):
        return False
    largest = max(conv.in_channels, conv.out_channels) * (features.numel() // max(1, features.shape[1]))
    return conv.in_channels % 8 == 0 and conv.out_channels % 8 == 0 and largest < MAX_CUDNN_SIZE


def _fold(conv: Any, norm: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weight and bias of the convolution with its norm folded into them."""
    weight, fixed = conv.weight, fixed_norm(norm, conv.bias)
    bias = weight.new_zeros(conv.out_channels) if fixed.bias is None else fixed.bias
    gain = fixed.weight
    if gain is not None and fixed.mean is not None and fixed.variance is not None:
        gain = gain * (fixed.variance + fixed.eps).rsqrt()
        bias = bias - fixed.mean * gain
    weight = weight if gain is None else weight * gain.view(-1, 1, 1, 1)
    return dispatch.cast(weight, dtype), dispatch.cast(bias, dtype)


# The first convolution, 3x3 of stride 2 over three colours, as one matrix product that gathers its own pixels. Three
# channels fill no tensor core; cuDNN takes eight times as long as reading and writing does. A program takes a patch of
# output pixels, gathers the 27 values under each from the image, whatever its dtype and layout, multiplies them (and
# five zeros) by the weight, and adds the bias, in inference also GELU and norm. A warp reads the same value of 32
# adjacent pixels, and rows of the weight as they are in memory.

if HAS_TRITON:

    @jit
    def _first_conv_kernel(
        x_ptr, weight_ptr, bias_ptr, norm_bias_ptr, norm_weight_ptr, mean_ptr, var_ptr, y_ptr,
        height, width, rows, columns, b_step, c_step, y_step, x_step,
        DIM: tl.constexpr, GELU: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """y (B, rows, columns, DIM), a patch of ROWS x COLUMNS of it; steps are the strides of x."""
        DTYPE: tl.constexpr = y_ptr.dtype.element_ty
        strips = tl.cdiv(rows, ROWS)
        image, strip = tl.program_id(0) // strips, tl.program_id(0) % strips
        pixel = tl.arange(0, ROWS * COLUMNS)[:, None]
        row, column = strip * ROWS + pixel // COLUMNS, tl.program_id(1) * COLUMNS + pixel % COLUMNS

        tap = tl.arange(0, 32)[None, :]
        colour, tap_y, tap_x = tap // 9, tap // 3 % 3 - 1, tap % 3 - 1
        y, x = 2 * row + tap_y, 2 * column + tap_x
        valid = (tap < 27) & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        start = x_ptr + image.to(tl.int64) * b_step
        offset = 2 * (row * y_step + column * x_step) + (colour * c_step + tap_y * y_step + tap_x * x_step)
        values = tl.load(start + offset, mask=valid, other=0.0).to(DTYPE)

        n = tl.arange(0, CHANNELS)
        weight = tl.load(weight_ptr + n[:, None] * 27 + tap, mask=(n[:, None] < DIM) & (tap < 27), other=0.0).to(DTYPE)
        total = tl.dot(values, tl.trans(weight))

        channel = n[None, :]
        valid = channel < DIM
        total += tl.load(bias_ptr + channel, mask=valid, other=0.0).to(tl.float32)
        if GELU:
            total = gelu(total, y_ptr.dtype.element_ty == tl.float32)
        gain, shift = affine_of_norm(norm_bias_ptr, norm_weight_ptr, mean_ptr, var_ptr, channel, valid, EPS, NORM)
        total = total * gain + shift
        inside = (row < rows) & (column < columns) & valid
        target = y_ptr + image.to(tl.int64) * rows * columns * DIM
        tl.store(target + (row * columns + column) * DIM + channel, total.to(DTYPE), mask=inside)


@variant
def _first_conv_kernel_of(channels: int, gelu: bool, norm: int, eps: float) -> Kernel:
    """A thread per output pixel."""
    constants = dict(DIM=channels, GELU=gelu, NORM=norm, EPS=eps)
    tile = dict(ROWS=8, COLUMNS=16, CHANNELS=max(16, next_power_of_2(channels)), num_warps=4)
    return Kernel(_first_conv_kernel, **constants, **tile)


def _first_conv_forward(
    images: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype, gelu: bool, norm_bias: Tensor | None,
    norm_weight: Tensor | None, mean: Tensor | None, variance: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    """norm(gelu(conv(images))) in `dtype`, channels-last."""
    (batch, _, height, width), channels = images.shape, weight.shape[0]
    rows, columns = cdiv(height, 2), cdiv(width, 2)
    y = torch.empty(
        batch, channels, rows, columns, dtype=dtype, device=images.device, memory_format=torch.channels_last
    )
    kind, tensors, eps = FixedNorm(norm_bias, norm_weight, mean, variance, eps).arguments(bias)
    kernel = _first_conv_kernel_of(channels, gelu, kind, eps)
    grid = batch * cdiv(rows, kernel.constants["ROWS"]), cdiv(columns, kernel.constants["COLUMNS"])
    kernel(grid, images, weight.contiguous(), bias, *tensors, y, height, width, rows, columns, *images.stride())
    return y


def _weight_gradient(g: Tensor, images: Tensor, weight: Tensor) -> Tensor:
    """Gradient of the weight of a convolution of stride 2, by cuDNN, over images in the dtype and layout of g."""
    g = g.contiguous(memory_format=torch.channels_last)
    images = images.to(g.dtype, memory_format=torch.channels_last)  # or else cuDNN would transpose g, which is larger
    layout = [2, 2], [weight.shape[2] // 2] * 2, [1, 1], False, [0, 0], 1
    shaped = g.new_empty(weight.shape)
    g_weight = torch.ops.aten.convolution_backward(g, images, shaped, None, *layout, [False, True, False])[1]
    return g_weight.to(weight.dtype, memory_format=torch.contiguous_format)


def _first_conv_gradients(g: Tensor, images: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    g = g.contiguous(memory_format=torch.channels_last)
    g_bias = rows_of.column_sum(g.permute(0, 2, 3, 1).flatten(0, 2))
    return _weight_gradient(g, images, weight), dispatch.cast(g_bias, bias.dtype)


def _first_conv_backward(ctx: Any, gradients: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    return None, *gradients(g, *ctx.saved_tensors), *(None for _ in ctx.options)


_first_conv = FusedOp("first_conv", _first_conv_forward, _first_conv_gradients, backward=_first_conv_backward)


def _run_first_conv(images: Tensor, conv: Any, gelu: bool = False, norm: FixedNorm = NO_NORM) -> Tensor:
    return _first_conv(images, conv.weight, conv.bias, dispatch.compute_dtype(images), gelu, *norm)


def is_stem_conv(images: Tensor, conv: Any, side: int = 7) -> bool:
    """A plain side x side convolution of stride 2 over three colours, in half precision, without image gradient."""
    if type(conv) is not nn.Conv2d or conv.in_channels != 3 or not dispatch.on_gpu(images) or images.requires_grad:
        return False
    layout = conv.kernel_size, conv.stride, conv.padding, conv.dilation
    if layout != ((side, side), (2, 2), (side // 2, side // 2), (1, 1)) or conv.groups != 1:
        return False
    if conv.padding_mode != "zeros" or not dispatch.is_plain(conv):
        return False
    dtype = dispatch.compute_dtype(images)
    return dtype in dispatch.HALF_DTYPES and dispatch.compute_dtype(conv.weight) == dtype


def _supports_first_conv(images: Tensor, conv: Any) -> bool:
    """3x3, with a bias, to few channels."""
    return is_stem_conv(images, conv, 3) and conv.bias is not None and conv.out_channels <= MAX_FIRST_CHANNELS


# ResNet's first convolution, 7x7 of stride 2, as a 4x4 convolution over blocks of 2x2 pixels: the same numbers. cuDNN's
# kernel for three channels takes ten times as long as reading and writing does. Blocks have 12 channels, or 16 with a
# colour of zeros; one pass over the images writes them, with the border that the convolution needs. Where the weight
# trains over 12 channels, its gradient is computed over pixels: over such blocks cuDNN takes twenty times as long.


def block_weight(weight: Tensor, dtype: torch.dtype, channels: int) -> Tensor:
    """weight (C, 3, 7, 7) -> its equal (C, channels, 4, 4) over blocks, channels-last; differentiable."""
    eight = F.pad(weight.to(dtype), (1, 0, 1, 0, 0, channels // 4 - 3))  # (C, colours, 8, 8)
    eight = eight.unflatten(3, (4, 2)).unflatten(2, (4, 2))  # (C, colours, 4, 2, 4, 2)
    return eight.permute(0, 2, 4, 3, 5, 1).flatten(3).permute(0, 3, 1, 2)


if HAS_TRITON:

    @jit
    def _blocks_kernel(
        x_ptr, y_ptr, height, width, rows, columns, b_step, c_step, y_step, x_step,
        DIM: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """Blocks y (B, rows, columns, DIM); block j of an axis has the pixels 2 j - 4 and 2 j - 3 of x."""
        COLOURS: tl.constexpr = DIM // 4
        image, row = tl.program_id(0) // rows, tl.program_id(0) % rows
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
        lane = tl.arange(0, LANES)[None, :]
        pixel, colour = lane // COLOURS, lane % COLOURS
        y, x = 2 * row - 4 + pixel // 2, 2 * column - 4 + pixel % 2
        valid = (lane < DIM) & (colour < 3) & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        offset = image.to(tl.int64) * b_step + colour * c_step + y * y_step + x * x_step
        values = tl.load(x_ptr + offset, mask=valid, other=0.0)
        target = (tl.program_id(0).to(tl.int64) * columns + column) * DIM + lane
        tl.store(y_ptr + target, values.to(y_ptr.dtype.element_ty), mask=(column < columns) & (lane < DIM))


@variant
def _blocks_kernel_of(channels: int) -> Kernel:
    return Kernel(_blocks_kernel, DIM=channels, LANES=16, COLUMNS=BLOCK_COLUMNS)


def _to_blocks(images: Tensor, dtype: torch.dtype, channels: int) -> Tensor:
    batch, _, height, width = images.shape
    rows, columns = cdiv(height, 2) + 3, cdiv(width, 2) + 3
    blocks = torch.empty(
        batch, channels, rows, columns, dtype=dtype, device=images.device, memory_format=torch.channels_last
    )
    grid = batch * rows, cdiv(columns, BLOCK_COLUMNS)
    _blocks_kernel_of(channels)(grid, images, blocks, height, width, rows, columns, *images.stride())
    return blocks


to_blocks = FusedOp("to_blocks", _to_blocks)


def _stem_forward(images: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    y = F.conv2d(_to_blocks(images, dtype, 12), block_weight(weight, dtype, 12))
    return y.contiguous(memory_format=torch.channels_last)


def _stem_backward(ctx: Any, gradients: Any, g: Tensor) -> tuple[None, Tensor, None]:
    return None, gradients(g, *ctx.saved_tensors), None


_stem_conv = FusedOp("stem_conv", _stem_forward, _weight_gradient, backward=_stem_backward)


def _convolve_blocks(images: Tensor, conv: nn.Conv2d) -> Tensor:
    weight, dtype = conv.weight, dispatch.compute_dtype(images)
    channels = 16 if conv.out_channels % 64 == 0 else 12  # the faster (docs/dev/performance.md)
    if channels == 12 and dispatch.needs_grad(weight):
        return _stem_conv(images, weight, dtype)
    over_blocks = cached_layout(weight, ("blocks", dtype), lambda: block_weight(weight, dtype, channels))
    return F.conv2d(to_blocks(images, dtype, channels), over_blocks)


# conv


@register_op("conv", reference=conv_reference, supports=_supports_first_conv)
def conv(features: Tensor, layer: nn.Module) -> Tensor:
    return _run_first_conv(features, layer)


@conv.add("epilogue", lambda features, layer: is_eager_inference(features, (layer,), ()) and layer.bias is not None)
def _conv_epilogue(features: Tensor, layer: Any) -> Tensor:
    return epilogue(convolve(features, layer), layer.bias)


@conv.add("blocks", is_stem_conv)
def _conv_blocks(features: Tensor, layer: Any) -> Tensor:
    raw = _convolve_blocks(features, layer)
    return raw if layer.bias is None else raw + layer.bias.to(raw.dtype).view(-1, 1, 1)


@conv.add("cast_weights", lambda _, layer: has_casts() and type(layer) is nn.Conv2d and dispatch.is_plain(layer))
def _conv_of_casts(features: Tensor, layer: Any) -> Tensor:
    return layer._conv_forward(features, *cast_weights(layer.weight, layer.bias))


# conv_norm_act


def _conv_and_norm(layers: nn.Sequential) -> tuple[nn.Module, ...]:
    """The two layers of a shortcut, where operations may call them one by one; else nothing."""
    if type(layers) is not nn.Sequential or len(layers) != 2 or dispatch.has_hooks(layers):
        return ()
    return tuple(layers)


def _convs_and_norms(
    layer: nn.Module, norm: nn.Module, shortcut_layers: nn.Sequential | None
) -> tuple[tuple[nn.Module, ...], tuple[nn.Module, ...]]:
    """All convolutions, and all norms; other layers of a shortcut as a convolution, which they are not."""
    if shortcut_layers is None:
        return (layer,), (norm,)
    shortcut_layer, *shortcut_norm = _conv_and_norm(shortcut_layers) or (shortcut_layers,)
    return (layer, shortcut_layer), (norm, *shortcut_norm)


def _ends_first_conv(
    images: Tensor, layer: nn.Module, norm: nn.Module, act: str = "", shortcut: Tensor | None = None,
    shortcut_layers: nn.Sequential | None = None, drop_path: nn.Module | None = None, *, pre_act: str = "",
) -> bool:  # fmt: skip
    """In inference, with nothing after the norm."""
    if dispatch.is_training() or act or pre_act not in ("", "gelu") or shortcut is not None or drop_path is not None:
        return False
    return _supports_first_conv(images, layer) and is_fixed_norm(norm)


@register_op("conv_norm_act", reference=conv_norm_act_reference, supports=_ends_first_conv)
def conv_norm_act(features: Tensor, layer: nn.Module, norm: nn.Module, *_: Any, pre_act: str = "", **__: Any) -> Tensor:
    return _run_first_conv(features, layer, pre_act == "gelu", fixed_norm(norm))


def _folds_into_cudnn(
    features: Tensor, layer: nn.Module, norm: nn.Module, act: str = "", shortcut: Tensor | None = None,
    shortcut_layers: nn.Sequential | None = None, drop_path: nn.Module | None = None, *, pre_act: str = "",
) -> bool:  # fmt: skip
    """In inference: under torch.compile, and in eager mode where norms and casts are no work for every call."""
    if act != "relu" or pre_act or dispatch.is_training() or (drop_path is not None and drop_path.training):
        return False
    tensors = (features,) if shortcut is None else (features, shortcut)
    if not dispatch.on_gpu(*tensors) or not dispatch.same_half_dtype(*tensors):
        return False
    if dispatch.compute_dtype(features) != features.dtype:
        return False
    convs, norms = _convs_and_norms(layer, norm, shortcut_layers)
    if not dispatch.is_compiling():
        if not all(isinstance(norm, nn.Identity) for norm in norms) or layer.weight.dtype != features.dtype:
            return False
        if not all(map(dispatch.is_channels_last, tensors)):
            return False
    if not all(type(conv) is nn.Conv2d and _can_use_cudnn(features, conv) for conv in convs):
        return False
    return dispatch.is_plain(*convs) and all(map(is_fixed_norm, norms))


@conv_norm_act.add("cudnn", _folds_into_cudnn)
def _conv_norm_act_cudnn(
    features: Tensor, layer: Any, norm: nn.Module, act: str = "", shortcut: Tensor | None = None,
    shortcut_layers: nn.Sequential | None = None, *_: Any, **__: Any,
) -> Tensor:  # fmt: skip
    weight, bias = _fold(layer, norm, features.dtype)
    if shortcut is not None and shortcut_layers is not None:
        other: Any = shortcut_layers[0]
        other_weight, other_bias = _fold(other, shortcut_layers[1], features.dtype)
        shortcut = F.conv2d(shortcut, other_weight, None, other.stride, other.padding, other.dilation)
        bias = bias + other_bias
    return _cudnn_conv_relu(features, weight, bias, layer, shortcut)


def _fuses_epilogue(
    features: Tensor, layer: nn.Module, norm: nn.Module, act: str = "", shortcut: Tensor | None = None,
    shortcut_layers: nn.Sequential | None = None, drop_path: nn.Module | None = None, *, pre_act: str = "",
) -> bool:  # fmt: skip
    if act not in ("", "relu") or pre_act not in ("", "gelu") or (drop_path is not None and drop_path.training):
        return False
    return is_eager_inference(features, *_convs_and_norms(layer, norm, shortcut_layers))


@conv_norm_act.add("epilogue", _fuses_epilogue)
def _conv_norm_act_epilogue(
    features: Tensor, layer: Any, norm: nn.Module, act: str = "", shortcut: Tensor | None = None,
    shortcut_layers: nn.Sequential | None = None, *_: Any, pre_act: str = "", **__: Any,
) -> Tensor:  # fmt: skip
    other = NO_NORM
    if shortcut is not None and shortcut_layers is not None:
        shortcut_layer: Any = shortcut_layers[0]
        other = fixed_norm(shortcut_layers[1], shortcut_layer.bias)
        shortcut = convolve(shortcut, shortcut_layer)
    raw = convolve(features, layer)
    return epilogue(raw, layer.bias, pre_act == "gelu", fixed_norm(norm), shortcut, other, act == "relu")


@conv_norm_act.add("composed", lambda features, *_, **__: dispatch.on_gpu(features) and dispatch.is_training())
def _conv_norm_act_composed(
    features: Tensor, layer: nn.Module, norm: nn.Module, act: str = "", shortcut: Tensor | None = None,
    shortcut_layers: nn.Sequential | None = None, drop_path: nn.Module | None = None, *, pre_act: str = "",
) -> Tensor:  # fmt: skip
    """Operations after each other; each decides by itself what it can fuse."""
    if shortcut is not None and shortcut_layers is not None:
        pair = _conv_and_norm(shortcut_layers)
        shortcut = conv_norm_act(shortcut, pair[0], pair[1]) if pair else shortcut_layers(shortcut)
    features = conv(features, layer)
    if drop_path is None:
        return norm_act(features, norm, shortcut, act, pre_act)
    features = drop_path(norm_act(features, norm, pre_act=pre_act))
    return ACTIVATIONS[act](features if shortcut is None else features + shortcut)
