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
from saccade.ops.layer_norm import bias_norm, is_channel_norm

if HAS_TRITON:
    import triton
    import triton.language as tl

    from saccade.ops._gelu import gelu
    from saccade.ops._rows import row_tile

EPILOGUE_ACTS = {"": 0, "gelu": 1, "silu": 2}
MAX_CUDNN_SIZE = 2**31  # values of the features; PyTorch splits larger batches, but not for the fused convolutions
MAX_FIRST_CHANNELS = 64  # output channels of the first convolution
BLOCK_COLUMNS = 64
Layers = Sequence[nn.Module] | nn.Sequential


def conv_act_norm_reference(features: Tensor, conv: nn.Module, norm: nn.Module, act: str = "") -> Tensor:
    """norm(act(conv(features))), features (B, C, H, W)."""
    return norm(ACTIVATIONS[act](conv(features)))


def conv_norm_act_reference(
    features: Tensor, conv: nn.Module, norm: nn.Module, act: str = "", shortcut: Tensor | None = None,
    shortcut_layers: Layers = (), drop_path: nn.Module | None = None,
) -> Tensor:  # fmt: skip
    """act(drop_path(norm(conv(features))) + shortcut), the shortcut through a convolution and a norm, or as it is."""
    features = norm(conv(features))
    if drop_path is not None:
        features = drop_path(features)
    if shortcut is not None:
        features = features + _apply_layers(shortcut_layers, shortcut)
    return ACTIVATIONS[act](features)


def conv_norm_reference(features: Tensor, conv: nn.Module, norm: nn.Module) -> Tensor:
    """norm(conv(features)), features (B, C, H, W), the norm a LayerNorm over channels."""
    return norm(conv(features))


def first_conv_reference(images: Tensor, conv: nn.Module) -> Tensor:
    """conv(images), images (B, 3, H, W) -> (B, C, H/2, W/2): 3x3 of stride 2."""
    return conv(images)


def stem_conv_reference(images: Tensor, conv: nn.Module) -> Tensor:
    """conv(images), images (B, 3, H, W) -> (B, C, H/2, W/2): 7x7 of stride 2."""
    return conv(images)


def _apply_layers(layers: Layers, features: Tensor) -> Tensor:
    if isinstance(layers, nn.Module):  # called itself, for its hooks
        return layers(features)
    for layer in layers:
        features = layer(features)
    return features


# What follows a convolution, as one kernel.


class FixedNorm(NamedTuple):
    """A norm with fixed statistics: bias, weight, mean and variance (C); or a shift and a gain; or a bias alone."""

    bias: Tensor
    weight: Tensor | None = None
    mean: Tensor | None = None
    variance: Tensor | None = None
    eps: float = 0.0

    @property
    def kind(self) -> int:
        """The NORM of `affine_of_norm`."""
        return 2 if self.mean is not None else 1 if self.weight is None else 3

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weight, bias, mean and variance; the bias where there is none."""
        return tuple(self.bias if x is None else x for x in (self.weight, self.bias, self.mean, self.variance))  # type: ignore[return-value] (four)


def norm_arguments(norm: FixedNorm | None, unused: Tensor) -> tuple[int, tuple[Tensor, ...], float]:
    """NORM, the four tensors and eps of `affine_of_norm`; `unused` in place of tensors that are not read."""
    return (0, (unused,) * 4, 0.0) if norm is None else (norm.kind, norm.tensors, norm.eps)


if HAS_TRITON:

    @triton.jit
    def affine_of_norm(weight_ptr, bias_ptr, mean_ptr, var_ptr, channel, valid, EPS: tl.constexpr, NORM: tl.constexpr):
        """Gain and shift per channel: of nothing (0), a bias (1), a norm (2), or themselves (3)."""
        shift = tl.zeros_like(channel).to(tl.float32)
        gain = shift + 1.0
        if NORM > 0:
            shift = tl.load(bias_ptr + channel, mask=valid, other=0.0).to(tl.float32)
        if NORM == 2:
            gain = tl.rsqrt(tl.load(var_ptr + channel, mask=valid, other=1.0).to(tl.float32) + EPS)
            gain *= tl.load(weight_ptr + channel, mask=valid, other=0.0).to(tl.float32)
            shift -= tl.load(mean_ptr + channel, mask=valid, other=0.0).to(tl.float32) * gain
        if NORM == 3:
            gain = tl.load(weight_ptr + channel, mask=valid, other=0.0).to(tl.float32)
        return gain, shift

    @jit
    def _epilogue_kernel(
        x_ptr, conv_bias_ptr, weight_ptr, bias_ptr, mean_ptr, var_ptr,
        s_ptr, s_weight_ptr, s_bias_ptr, s_mean_ptr, s_var_ptr, rows, units,
        UNIT: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
        SHORTCUT: tl.constexpr, S_NORM: tl.constexpr, S_EPS: tl.constexpr, RELU: tl.constexpr,
        ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """x = relu(norm(act(x + bias)) + s_norm(s)), in place."""
        channels = units * UNIT
        channel, valid, offset, mask = row_tile(rows, channels, ROWS, CHANNELS)
        x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        if BIAS:
            x += tl.load(conv_bias_ptr + channel, mask=valid, other=0.0).to(tl.float32)
        if ACT == 1:
            x = gelu(x, x_ptr.dtype.element_ty == tl.float32)
        if ACT == 2:
            x = x / (1 + tl.exp(-x))
        gain, shift = affine_of_norm(weight_ptr, bias_ptr, mean_ptr, var_ptr, channel, valid, EPS, NORM)
        x = x * gain + shift
        if SHORTCUT:
            s = tl.load(s_ptr + offset, mask=mask, other=0.0).to(tl.float32)
            gain, shift = affine_of_norm(s_weight_ptr, s_bias_ptr, s_mean_ptr, s_var_ptr, channel, valid, S_EPS, S_NORM)
            x += s * gain + shift
        if RELU:
            x = tl.where(x < 0, 0.0, x)  # unlike a maximum, propagates NaN
        tl.store(x_ptr + offset, x.to(x_ptr.dtype.element_ty), mask=mask)


@variant
def _epilogue(
    channels: int, bias: bool, act: str, norm: int, eps: float, shortcut: bool, s_norm: int, s_eps: float, relu: bool
) -> Kernel:
    constants = dict(BIAS=bias, ACT=EPILOGUE_ACTS[act], NORM=norm, EPS=eps)
    constants |= dict(SHORTCUT=shortcut, S_NORM=s_norm, S_EPS=s_eps, RELU=relu)
    return Kernel(_epilogue_kernel, **constants, **rows_of.tile_of(channels))


def epilogue(
    x: Tensor, bias: Tensor | None, act: str = "", norm: FixedNorm | None = None, shortcut: Tensor | None = None,
    shortcut_norm: FixedNorm | None = None, relu: bool = False,
) -> Tensor:  # fmt: skip
    """relu(norm(act(x + bias)) + shortcut_norm(shortcut)), written over x (B, C, H, W), where that is channels-last."""
    x, channels = x.contiguous(memory_format=torch.channels_last), x.shape[1]
    shortcut = None if shortcut is None else shortcut.contiguous(memory_format=torch.channels_last)
    unused = next((value for value in (bias, norm and norm.bias, shortcut) if value is not None), None)
    if unused is None:
        return F.relu(x) if relu else ACTIVATIONS[act](x)
    kind, tensors, eps = norm_arguments(norm, unused)
    s_kind, s_tensors, s_eps = norm_arguments(shortcut_norm, unused)
    kernel = _epilogue(channels, bias is not None, act, kind, eps, shortcut is not None, s_kind, s_eps, relu)
    rows = x.numel() // channels
    inputs = unused if bias is None else bias, *tensors, unused if shortcut is None else shortcut, *s_tensors
    kernel(rows_of.row_grid(kernel, rows, channels), x, *inputs, rows, channels // kernel.constants["UNIT"])
    return x


def fixed_norm(norm: nn.Module) -> FixedNorm | None:
    """The norm's tensors. None for nn.Identity, which is what folding a norm leaves.

    Besides BatchNorm, a plain layer with attributes `gain` and `shift` (gain x + shift) is one.
    """
    if isinstance(norm, nn.Identity):
        return None
    if isinstance(norm, nn.BatchNorm2d):
        return FixedNorm(norm.bias, norm.weight, norm.running_mean, norm.running_var, norm.eps)
    gain, shift = norm.gain, norm.shift
    assert isinstance(gain, Tensor) and isinstance(shift, Tensor)  # noqa: PT018
    return FixedNorm(shift.flatten(), gain.flatten())


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
    return (
        all(type(conv) is nn.Conv2d for conv in convs) and dispatch.is_plain(*convs) and all(map(is_fixed_norm, norms))
    )


def convolve(features: Tensor, conv: nn.Conv2d) -> Tensor:
    """conv(features) without the bias."""
    if is_stem_conv(features, conv):
        return _convolve_blocks(features, conv)
    return conv._conv_forward(features, cast_weight(conv.weight), None)


def convolve_norm(features: Tensor, conv: nn.Conv2d, norm: nn.Module) -> tuple[Tensor, FixedNorm | None]:
    """The convolution without its bias, and the norm that remains, bias included."""
    fixed, bias = fixed_norm(norm), conv.bias
    if fixed is None:
        fixed = None if bias is None else FixedNorm(bias)
    elif bias is not None and fixed.mean is not None:
        fixed = fixed._replace(mean=fixed.mean - bias)
    elif bias is not None and fixed.weight is not None:
        fixed = fixed._replace(bias=fixed.bias + fixed.weight * bias)
    return convolve(features, conv), fixed


# cuDNN's convolution with bias, sum and ReLU. After a 1x1 convolution to many channels a separate pass takes longer
# than the convolution.


def _fake_cudnn(
    features: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    shaped = F.conv2d(features, weight, None, stride, padding, dilation)
    return torch.empty_like(shaped, memory_format=torch.channels_last)


dispatch.register_aten_fake(
    "cudnn_convolution_relu", lambda x, weight, bias, *sizes: _fake_cudnn(x, weight, *sizes[:3])
)
dispatch.register_aten_fake(
    "cudnn_convolution_add_relu", lambda x, weight, z, alpha, bias, *sizes: _fake_cudnn(x, weight, *sizes[:3])
)


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
    """Half precision, zero padding, one group, channels in multiples of 8."""
    if not dispatch.can_use_cudnn(features) or not dispatch.same_half_dtype(features):
        return False
    if conv.groups != 1 or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
        return False
    largest = max(conv.in_channels, conv.out_channels) * (features.numel() // max(1, features.shape[1]))
    return conv.in_channels % 8 == 0 and conv.out_channels % 8 == 0 and largest < MAX_CUDNN_SIZE


def _folded_into_cudnn(features: Tensor, conv: nn.Conv2d, shortcut: Tensor | None) -> bool:
    """Whether a convolution that ends in its bias can run with cuDNN in eager mode: all in the dtype of the features.

    Under autocast a float32 weight would be cast at every call: only weights that are cast already use this path.
    """
    if conv.bias is None or dispatch.compute_dtype(features) != features.dtype or not _can_use_cudnn(features, conv):
        return False
    tensors = (features,) if shortcut is None else (features, shortcut)
    layout = all(dispatch.is_channels_last(value) for value in tensors)
    return layout and dispatch.same_half_dtype(*tensors, conv.weight, conv.bias)


def _fold(conv: nn.Conv2d, norm: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weight and bias of the convolution with its norm folded into them."""
    bias = conv.weight.new_zeros(conv.out_channels) if conv.bias is None else conv.bias
    if isinstance(norm, nn.BatchNorm2d):
        assert norm.running_var is not None and norm.running_mean is not None  # noqa: PT018
        gain = norm.weight * (norm.running_var + norm.eps).rsqrt()
        shift = norm.bias + (bias - norm.running_mean) * gain
        return (conv.weight * gain.view(-1, 1, 1, 1)).to(dtype), shift.to(dtype)
    return conv.weight.to(dtype), bias.to(dtype)


# conv_norm_act


def _pairs(
    conv: nn.Module, norm: nn.Module, shortcut_layers: Layers
) -> tuple[tuple[nn.Module, ...], tuple[nn.Module, ...]]:
    """All convolutions, and all norms; a shortcut other than convolution and norm as a convolution it is not."""
    layers = tuple(shortcut_layers)
    has_hooks = isinstance(shortcut_layers, nn.Module) and dispatch.has_hooks(shortcut_layers)
    if len(layers) not in (0, 2) or has_hooks:
        return (conv, nn.Identity()), (norm,)
    return (conv, *layers[:1]), (norm, *layers[1:])


def _folds_in_graph(
    features: Tensor, conv: nn.Module, norm: nn.Module, act: str = "", shortcut: Tensor | None = None,
    shortcut_layers: Layers = (), drop_path: nn.Module | None = None,
) -> bool:  # fmt: skip
    """Inference under torch.compile, of features in half precision."""
    if not dispatch.on_gpu(features) or dispatch.is_training() or not dispatch.is_compiling() or act != "relu":
        return False
    if dispatch.compute_dtype(features) != features.dtype or (drop_path is not None and drop_path.training):
        return False
    convs, norms = _pairs(conv, norm, shortcut_layers)
    if not all(type(conv) is nn.Conv2d and _can_use_cudnn(features, conv) for conv in convs):
        return False
    foldable = all(isinstance(norm, nn.BatchNorm2d | nn.Identity) and is_fixed_norm(norm) for norm in norms)
    return foldable and dispatch.is_plain(*convs)


def _conv_norm_act_folded(
    features: Tensor, conv: nn.Module, norm: nn.Module, act: str = "", shortcut: Tensor | None = None,
    shortcut_layers: Layers = (), drop_path: nn.Module | None = None,
) -> Tensor:  # fmt: skip
    assert isinstance(conv, nn.Conv2d)
    weight, bias = _fold(conv, norm, features.dtype)
    if shortcut is not None and len(shortcut_layers) > 0:
        other, other_norm = shortcut_layers
        assert isinstance(other, nn.Conv2d)
        other_weight, other_bias = _fold(other, other_norm, features.dtype)
        shortcut = F.conv2d(shortcut, other_weight, None, other.stride, other.padding, other.dilation)
        bias = bias + other_bias
    return _cudnn_conv_relu(features, weight, bias, conv, shortcut)


def _fuses_epilogue(
    features: Tensor, conv: nn.Module, norm: nn.Module, act: str = "", shortcut: Tensor | None = None,
    shortcut_layers: Layers = (), drop_path: nn.Module | None = None,
) -> bool:  # fmt: skip
    if act not in ("", "relu") or (drop_path is not None and drop_path.training):
        return False
    return is_eager_inference(features, *_pairs(conv, norm, shortcut_layers))


@register_op("conv_norm_act", reference=conv_norm_act_reference, supports=_fuses_epilogue)
def conv_norm_act(
    features: Tensor, conv: nn.Module, norm: nn.Module, act: str = "", shortcut: Tensor | None = None,
    shortcut_layers: Layers = (), drop_path: nn.Module | None = None,
) -> Tensor:  # fmt: skip
    assert isinstance(conv, nn.Conv2d)
    other, folded = None, isinstance(norm, nn.Identity)
    if shortcut is not None and len(shortcut_layers) > 0:
        other_conv, other_norm = shortcut_layers
        shortcut, other = convolve_norm(shortcut, other_conv, other_norm)  # type: ignore[arg-type] (see _pairs)
        folded = folded and isinstance(other_norm, nn.Identity)
    if folded and act == "relu" and _folded_into_cudnn(features, conv, shortcut):
        assert conv.bias is not None
        bias = conv.bias if other is None else conv.bias + other.bias
        return _cudnn_conv_relu(features, conv.weight, bias, conv, shortcut)
    raw, fixed = convolve_norm(features, conv, norm)
    return epilogue(raw, None, "", fixed, shortcut, other, act == "relu")


conv_norm_act.add("cudnn", _folds_in_graph)(_conv_norm_act_folded)


def _apply_conv(features: Tensor, conv: nn.Module) -> Tensor:
    """conv(features), with the casts of its weights where torch.compile traces them."""
    if type(conv) is nn.Conv2d and has_casts() and dispatch.is_plain(conv):
        return conv._conv_forward(features, *cast_weights(conv.weight, conv.bias))
    return conv(features)


@conv_norm_act.add("norm_act", lambda features, *_, **__: dispatch.on_gpu(features) and dispatch.is_training())
def _conv_norm_act_training(
    features: Tensor, conv: nn.Module, norm: nn.Module, act: str = "", shortcut: Tensor | None = None,
    shortcut_layers: Layers = (), drop_path: nn.Module | None = None,
) -> Tensor:  # fmt: skip
    """`norm_act` after the convolution; it decides by itself what it can fuse."""
    if (
        shortcut is not None
        and len(shortcut_layers) == 2
        and not (isinstance(shortcut_layers, nn.Module) and dispatch.has_hooks(shortcut_layers))
    ):
        shortcut_conv, shortcut_norm = shortcut_layers
        shortcut = norm_act(_apply_conv(shortcut, shortcut_conv), shortcut_norm)
    elif shortcut is not None:
        shortcut = _apply_layers(shortcut_layers, shortcut)
    if drop_path is None:
        return norm_act(_apply_conv(features, conv), norm, shortcut, act)
    features = drop_path(norm_act(_apply_conv(features, conv), norm))
    return ACTIVATIONS[act](features if shortcut is None else features + shortcut)


# conv_act_norm and the first convolution: 3x3 of stride 2 over three colours, as one matrix product that gathers its
# own pixels. Three channels fill no tensor core; cuDNN takes eight times as long as reading and writing does. A program
# takes a patch of output pixels, gathers the 27 values under each from the image, whatever its dtype and layout,
# multiplies them (and five zeros) by the weight, and adds the bias, in inference also GELU and norm. A warp reads the
# same value of 32 adjacent pixels, and rows of the weight as they are in memory.

if HAS_TRITON:

    @jit
    def _first_conv_kernel(
        x_ptr, weight_ptr, bias_ptr, norm_weight_ptr, norm_bias_ptr, mean_ptr, var_ptr, y_ptr,
        height, width, rows, columns, b_step, c_step, y_step, x_step,
        DIM: tl.constexpr, COLOURS_LAST: tl.constexpr, GELU: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """y (B, rows, columns, DIM), a patch of ROWS x COLUMNS of it; steps are the strides of x.

        The 27 values are in the memory order of the weight, which is (C, 3, 3, colours) with COLOURS_LAST.
        """
        DTYPE: tl.constexpr = y_ptr.dtype.element_ty
        strips = tl.cdiv(rows, ROWS)
        image, strip = tl.program_id(0) // strips, tl.program_id(0) % strips
        pixel = tl.arange(0, ROWS * COLUMNS)[:, None]
        row, column = strip * ROWS + pixel // COLUMNS, tl.program_id(1) * COLUMNS + pixel % COLUMNS

        tap = tl.arange(0, 32)[None, :]
        if COLOURS_LAST:
            tap_y, tap_x, colour = tap // 9 - 1, tap // 3 % 3 - 1, tap % 3
        else:
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
        if NORM > 0:
            gain, shift = affine_of_norm(norm_weight_ptr, norm_bias_ptr, mean_ptr, var_ptr, channel, valid, EPS, NORM)
            total = total * gain + shift
        inside = (row < rows) & (column < columns) & valid
        target = y_ptr + image.to(tl.int64) * rows * columns * DIM
        tl.store(target + (row * columns + column) * DIM + channel, total.to(DTYPE), mask=inside)


@variant
def _first_conv_kernel_of(channels: int, colours_last: bool, gelu: bool, norm: int, eps: float) -> Kernel:
    """A thread per output pixel."""
    constants = dict(DIM=channels, COLOURS_LAST=colours_last, GELU=gelu, NORM=norm, EPS=eps)
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
    norm = None if norm_bias is None else FixedNorm(norm_bias, norm_weight, mean, variance, eps)
    kind, tensors, eps = norm_arguments(norm, bias)
    colours_last = weight.is_contiguous(memory_format=torch.channels_last)
    weight = weight if colours_last else weight.contiguous()
    kernel = _first_conv_kernel_of(channels, colours_last, gelu, kind, eps)
    grid = batch * cdiv(rows, kernel.constants["ROWS"]), cdiv(columns, kernel.constants["COLUMNS"])
    kernel(grid, images, weight, bias, *tensors, y, height, width, rows, columns, *images.stride())
    return y


def _first_conv_gradients(g: Tensor, images: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias: cuDNN's, over images cast to the dtype of g."""
    g = g.contiguous(memory_format=torch.channels_last)
    inputs = g, dispatch.cast(images, g.dtype), dispatch.cast(weight, g.dtype), None
    layout = [2, 2], [1, 1], [1, 1], False, [0, 0], 1
    g_weight = torch.ops.aten.convolution_backward(*inputs, *layout, [False, True, False])[1]
    g_bias = rows_of.column_sum(g.permute(0, 2, 3, 1).flatten(0, 2))
    return g_weight.to(weight.dtype, memory_format=torch.contiguous_format), dispatch.cast(g_bias, bias.dtype)


def _first_conv_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    images, weight, bias, _, gelu, norm_bias, *_ = inputs
    assert not gelu and norm_bias is None, "GELU and norm are fused in inference only"  # noqa: PT018
    ctx.save_for_backward(images, weight, bias)


def _first_conv_backward(ctx: Any, gradients: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    return None, *gradients(g, *ctx.saved_tensors), *(None,) * 7


_first_conv = FusedOp("first_conv", _first_conv_forward, _first_conv_gradients, _first_conv_setup, _first_conv_backward)


def _run_first_conv(images: Tensor, conv: Any, gelu: bool = False, norm: FixedNorm | None = None) -> Tensor:
    tensors = (None, None, None, None, 0.0) if norm is None else norm
    return _first_conv(images, conv.weight, conv.bias, dispatch.compute_dtype(images), gelu, *tensors)


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


@register_op("first_conv", reference=first_conv_reference, supports=_supports_first_conv)
def first_conv(images: Tensor, conv: nn.Module) -> Tensor:
    return _run_first_conv(images, conv)


@first_conv.add("epilogue", lambda images, conv: is_eager_inference(images, (conv,), ()))
def _conv_bias(images: Tensor, conv: nn.Module) -> Tensor:
    """conv(images), the bias added by the epilogue kernel."""
    assert isinstance(conv, nn.Conv2d)
    return epilogue(convolve(images, conv), conv.bias)


def _supports_first_conv_norm(images: Tensor, conv: nn.Module, norm: nn.Module, act: str = "") -> bool:
    inference = act in ("", "gelu") and not dispatch.is_training() and is_fixed_norm(norm)
    return inference and _supports_first_conv(images, conv)


@register_op("conv_act_norm", reference=conv_act_norm_reference, supports=_supports_first_conv_norm)
def conv_act_norm(features: Tensor, conv: nn.Module, norm: nn.Module, act: str = "") -> Tensor:
    return _run_first_conv(features, conv, act == "gelu", fixed_norm(norm))


@conv_act_norm.add(
    "epilogue",
    lambda features, conv, norm, act="": act in EPILOGUE_ACTS and is_eager_inference(features, (conv,), (norm,)),
)
def _conv_act_norm_epilogue(features: Tensor, conv: nn.Module, norm: nn.Module, act: str = "") -> Tensor:
    assert isinstance(conv, nn.Conv2d)
    return epilogue(convolve(features, conv), conv.bias, act, fixed_norm(norm))


@conv_act_norm.add("norm_act", lambda features, *_, **__: dispatch.on_gpu(features) and dispatch.is_training())
def _conv_act_norm_training(features: Tensor, conv: nn.Module, norm: nn.Module, act: str = "") -> Tensor:
    """`norm_act` after the convolution; both decide by themselves what they can fuse."""
    return norm_act(first_conv(features, conv), norm, pre_act=act)


def _supports_conv_norm(features: Tensor, conv: nn.Module, norm: nn.Module) -> bool:
    """In inference, and under torch.compile, which would add the bias in another memory order."""
    if not dispatch.on_gpu(features) or type(conv) is not nn.Conv2d or not dispatch.is_plain(conv):
        return False
    return conv.bias is not None and (dispatch.is_compiling() or not dispatch.is_training())


@register_op("conv_norm", reference=conv_norm_reference, supports=_supports_conv_norm)
def conv_norm(features: Tensor, conv: nn.Module, norm: nn.Module) -> Tensor:
    assert isinstance(conv, nn.Conv2d) and conv.bias is not None  # noqa: PT018
    if _supports_first_conv(features, conv):
        return norm(first_conv(features, conv))
    pixels = convolve(features, conv).permute(0, 2, 3, 1)  # (B, H, W, C)
    if is_channel_norm(norm):
        weight, bias, eps = norm.weight, norm.bias, norm.eps
        return bias_norm(pixels, conv.bias, weight, bias, eps).permute(0, 3, 1, 2)  # type: ignore[arg-type] (a LayerNorm)
    return norm((pixels + conv.bias.to(pixels.dtype)).permute(0, 3, 1, 2))


# ResNet's first convolution, 7x7 of stride 2, as a 4x4 convolution over blocks of 2x2 pixels: the same numbers. cuDNN's
# kernel for three channels takes ten times as long as reading and writing does. Blocks have 12 channels, or 16 with a
# colour of zeros; one pass over the images writes them, with the border that the convolution needs. Where the weight
# trains over 12 channels, its gradient is computed over pixels: over such blocks cuDNN takes twenty times as long.


def to_blocks_reference(images: Tensor, dtype: torch.dtype, channels: int) -> Tensor:
    """images (B, 3, H, W) -> blocks (B, channels, H/2 + 3, W/2 + 3); block j has the pixels 2 j - 4 and 2 j - 3."""
    height, width = images.shape[2:]
    padded = F.pad(images, (4, 2 + width % 2, 4, 2 + height % 2, 0, channels // 4 - 3))
    blocks = F.pixel_unshuffle(padded, 2).unflatten(1, (-1, 4))  # (B, colours, 4, ...)
    return blocks.transpose(1, 2).flatten(1, 2).to(dtype).contiguous(memory_format=torch.channels_last)


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
    channels = _block_channels(weight.shape[0])
    blocks = _to_blocks(images, dtype, channels)
    return F.conv2d(blocks, block_weight(weight, dtype, channels)).contiguous(memory_format=torch.channels_last)


def _stem_gradient(g: Tensor, images: Tensor, dtype: torch.dtype) -> Tensor:
    """g (B, C, H/2, W/2), images (B, 3, H, W) -> gradient of the weight (C, 3, 7, 7)."""
    weight = g.new_empty(g.shape[1], 3, 7, 7)  # for its shape
    images = images.to(g.dtype, memory_format=torch.channels_last)  # or else cuDNN would transpose g, which is larger
    g = g.contiguous(memory_format=torch.channels_last)
    layout = [2, 2], [3, 3], [1, 1], False, [0, 0], 1
    g_weight = torch.ops.aten.convolution_backward(g, images, weight, None, *layout, [False, True, False])[1]
    return g_weight.to(dtype, memory_format=torch.contiguous_format)


def _stem_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    images, weight, _ = inputs
    ctx.save_for_backward(images)
    ctx.dtype = weight.dtype


def _stem_backward(ctx: Any, gradients: Any, g: Tensor) -> tuple[None, Tensor, None]:
    return None, gradients(g, *ctx.saved_tensors, ctx.dtype), None


_stem_conv = FusedOp("stem_conv", _stem_forward, _stem_gradient, _stem_setup, _stem_backward)


def _block_channels(out_channels: int) -> int:
    """Channels of a block for the fastest convolution to so many channels (docs/dev/performance.md)."""
    return 16 if out_channels % 64 == 0 else 12


def _convolve_blocks(images: Tensor, conv: nn.Conv2d) -> Tensor:
    weight, dtype, channels = conv.weight, dispatch.compute_dtype(images), _block_channels(conv.out_channels)
    if channels == 12 and dispatch.needs_grad(weight):
        return _stem_conv(images, weight, dtype)
    over_blocks = cached_layout(weight, ("blocks", dtype), lambda: block_weight(weight, dtype, channels))
    return F.conv2d(to_blocks(images, dtype, channels), over_blocks)


@register_op("stem_conv", reference=stem_conv_reference, supports=is_stem_conv)
def stem_conv(images: Tensor, conv: nn.Module) -> Tensor:
    assert isinstance(conv, nn.Conv2d)
    raw = _convolve_blocks(images, conv)
    return raw if conv.bias is None else raw + conv.bias.to(raw.dtype).view(-1, 1, 1)
