"""Stems that end in max pooling.

The features before the pooling are the largest of the model. ATen reads them once for the bias or the norm, once for
the ReLU, once to pool them, and runs two more passes over the result for a norm of its pixels. Here they are read once;
and in training written once in backward: each pixel checks whether it was the maximum of the windows it is in, which
are four at most.
"""

from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.ops import _dispatch as dispatch
from saccade.ops._dispatch import FusedOp, register_op
from saccade.ops._launch import HAS_TRITON, Kernel, cdiv, jit, next_power_of_2, variant
from saccade.ops._rows import column_sum
from saccade.ops.batch_norm import norm_act
from saccade.ops.conv import FixedNorm, conv, convolve, fixed_norm, is_eager_inference, is_stem_conv

if HAS_TRITON:
    import triton.language as tl

    from saccade.ops.conv import affine_of_norm

MAX_CHANNELS = 512


def conv_pool_relu_reference(images: Tensor, layer: nn.Module, norm: nn.Module) -> Tensor:
    """norm(relu(max_pool(layer(images)))), images (B, 3, H, W) -> (B, C, H/4, W/4); pooling 3x3 of stride 2.

    The kernels read the norm from its method `pixel_norm_constants(channels) -> (eps, scale)`: every pixel normalised
    over its channels, with the biased variance plus eps, then multiplied by scale. Its class is a `plain_layer`.
    """
    return norm(F.relu(F.max_pool2d(layer(images), 3, stride=2, padding=1)))


def conv_norm_relu_pool_reference(images: Tensor, layer: nn.Module, norm: nn.Module, pool: nn.Module) -> Tensor:
    """pool(relu(norm(layer(images)))), images (B, 3, H, W): the stem of a ResNet."""
    return pool(F.relu(norm(layer(images))))


def max_pool_reference(features: Tensor, pool: nn.Module) -> Tensor:
    """pool(features), features (B, C, H, W) -> (B, C, H/2, W/2)."""
    return pool(features)


if HAS_TRITON:

    @jit
    @no_type_check
    def _pool_kernel(
        x_ptr, bias_ptr, weight_ptr, mean_ptr, var_ptr, y_ptr, index_ptr, scale_ptr,
        height, width, out_height, out_width,
        DIM: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, RELU: tl.constexpr, PIXEL_NORM: tl.constexpr,
        PIXEL_EPS: tl.constexpr, PIXEL_SCALE: tl.constexpr, TRAIN: tl.constexpr, COLUMNS: tl.constexpr,
        CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """TRAIN also stores the index of the maximum in its window (0 to 8; 9 where ReLU gave 0), and pixel scales."""
        image, row = tl.program_id(0) // out_height, tl.program_id(0) % out_height
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
        channel = tl.arange(0, CHANNELS)[None, :]
        in_range = channel < DIM
        gain, shift = affine_of_norm(bias_ptr, weight_ptr, mean_ptr, var_ptr, channel, in_range, EPS, NORM)
        x_ptr += image.to(tl.int64) * height * width * DIM
        best = tl.full((COLUMNS, CHANNELS), float("-inf"), tl.float32)
        index = tl.zeros((COLUMNS, CHANNELS), tl.int32)
        for i in tl.static_range(3):
            for j in tl.static_range(3):
                y, x = 2 * row + i - 1 + tl.zeros_like(column), 2 * column + j - 1
                valid = (y >= 0) & (y < height) & (x >= 0) & (x < width) & in_range
                value = tl.load(x_ptr + (y * width + x) * DIM + channel, mask=valid, other=0.0)
                value = tl.where(valid, value.to(tl.float32) * gain + shift, float("-inf"))
                larger = (value > best) | (value != value)  # NaN is the maximum, as in PyTorch
                if TRAIN:
                    index = tl.where(larger, 3 * i + j, index)
                best = tl.where(larger, value, best)
        pooled = best
        if RELU:
            pooled = tl.where(best < 0, 0.0, best)
            index = tl.where(best > 0, index, 9)
        pixel = tl.program_id(0).to(tl.int64) * out_width + column
        valid = in_range & (column < out_width)
        if PIXEL_NORM:
            pooled = tl.where(in_range, pooled, 0.0)
            pooled = tl.where(in_range, pooled - tl.sum(pooled, 1)[:, None] / DIM, 0.0)
            scale = PIXEL_SCALE * tl.rsqrt(tl.sum(pooled * pooled, 1) / DIM + PIXEL_EPS)[:, None]
            pooled *= scale
            if TRAIN:
                tl.store(scale_ptr + pixel, scale, mask=column < out_width)
        tl.store(y_ptr + pixel * DIM + channel, pooled.to(y_ptr.dtype.element_ty), mask=valid)
        if TRAIN:
            tl.store(index_ptr + pixel * DIM + channel, index.to(tl.uint8), mask=valid)

    @jit
    @no_type_check
    def _relu_norm_gradient_kernel(
        g_ptr, y_ptr, index_ptr, scale_ptr, g_pooled_ptr, rows,
        DIM: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """The gradient before the norm of the pixels and the ReLU."""
        pixel = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        row, channel = pixel[:, None], tl.arange(0, CHANNELS)[None, :]
        mask = (row < rows) & (channel < DIM)
        offset = row * DIM + channel
        g = tl.load(g_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        normed = tl.load(y_ptr + offset, mask=mask, other=0.0).to(tl.float32) / SCALE
        scale = tl.load(scale_ptr + pixel, mask=pixel < rows, other=0.0)[:, None]
        g = (g - tl.sum(g, 1)[:, None] / DIM - normed * (tl.sum(g * normed, 1)[:, None] / DIM)) * scale
        g = tl.where(tl.load(index_ptr + offset, mask=mask, other=9) < 9, g, 0.0)
        tl.store(g_pooled_ptr + offset, g.to(g_pooled_ptr.dtype.element_ty), mask=mask)

    @jit
    @no_type_check
    def _unpool_kernel(
        g_ptr, index_ptr, g_x_ptr, height, width, out_height, out_width,
        DIM: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """The gradient of the features: of every window in which a pixel was the maximum."""
        image, row = tl.program_id(0) // height, tl.program_id(0) % height
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
        channel = tl.arange(0, CHANNELS)[None, :]
        start = image.to(tl.int64) * out_height * out_width * DIM
        total = tl.zeros((COLUMNS, CHANNELS), tl.float32)
        for i in tl.static_range(3):
            y = (row + 1 - i) // 2
            if ((row + 1 - i) % 2 == 0) & (y < out_height) & (row + 1 >= i):
                for j in tl.static_range(3):
                    x = (column + 1 - j) // 2
                    valid = ((column + 1 - j) % 2 == 0) & (column + 1 >= j) & (x < out_width) & (channel < DIM)
                    offset = start + (y * out_width + x) * DIM + channel
                    is_maximum = tl.load(index_ptr + offset, mask=valid, other=9) == 3 * i + j
                    g = tl.load(g_ptr + offset, mask=valid, other=0.0)  # all of them: one wide load
                    total += tl.where(is_maximum, g.to(tl.float32), 0.0)
        offset = (tl.program_id(0).to(tl.int64) * width + column) * DIM + channel
        mask = (column < width) & (channel < DIM)
        tl.store(g_x_ptr + offset, total.to(g_x_ptr.dtype.element_ty), mask=mask)


def _tile(channels: int, rows: str = "COLUMNS", elements: int = 2048) -> dict[str, int]:
    width = max(16, next_power_of_2(channels))
    return {"DIM": channels, rows: max(1, elements // width), "CHANNELS": width}


@variant
def _pool(
    channels: int, norm: int, eps: float, relu: bool, pixel_eps: float | None, pixel_scale: float, train: bool
) -> Kernel:
    constants = dict(NORM=norm, EPS=eps, RELU=relu, PIXEL_NORM=pixel_eps is not None, PIXEL_EPS=pixel_eps or 0.0)
    tile = _tile(channels, elements=1024 if train else 2048)
    return Kernel(_pool_kernel, **constants, PIXEL_SCALE=pixel_scale, TRAIN=train, **tile)


@variant
def _gradient_kernels(channels: int, pixel_scale: float) -> tuple[Kernel, Kernel]:
    before = Kernel(_relu_norm_gradient_kernel, SCALE=pixel_scale, **_tile(channels, "ROWS"))
    return before, Kernel(_unpool_kernel, **_tile(channels))


def _run_pool(
    features: Tensor, norm: FixedNorm, relu: bool, pixel_eps: float | None, pixel_scale: float, train: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Pooled features (B, C, H/2, W/2), in training also the indices of the maxima and the scales of the pixels."""
    features = features.contiguous(memory_format=torch.channels_last)
    batch, channels, height, width = features.shape
    out_height, out_width = cdiv(height, 2), cdiv(width, 2)
    size = batch, channels, out_height, out_width
    pooled = torch.empty(size, dtype=features.dtype, device=features.device, memory_format=torch.channels_last)
    index, scale = features, features  # not written in inference
    if train:
        index = torch.empty_like(pooled, dtype=torch.uint8)
        scales = (0,) if pixel_eps is None else (batch, out_height, out_width)
        scale = torch.empty(scales, dtype=torch.float32, device=features.device)
    kind, tensors, eps = norm.arguments(features)
    kernel = _pool(channels, kind, eps, relu, pixel_eps, pixel_scale, train)
    grid = batch * out_height, cdiv(out_width, kernel.constants["COLUMNS"])
    kernel(grid, features, *tensors, pooled, index, scale, height, width, out_height, out_width)
    return pooled, index, scale


def _forward(
    features: Tensor, bias: Tensor | None, pixel_eps: float | None, pixel_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """In training: max pooling, and with a bias, which is added to its output, ReLU and the norm of the pixels."""
    return _run_pool(features, FixedNorm(bias), bias is not None, pixel_eps, pixel_scale, True)


def _gradients(
    g: Tensor, index: Tensor, scale: Tensor, pooled: Tensor | None, height: int, width: int, pixel_scale: float
) -> tuple[Tensor, Tensor]:
    """Gradients of the features, and of the bias in float32; without `pooled`, of the pooling alone."""
    g = g.contiguous(memory_format=torch.channels_last)
    batch, channels, out_height, out_width = g.shape
    rows = batch * out_height * out_width
    before, unpool = _gradient_kernels(channels, pixel_scale)
    g_bias = g.new_empty(0, dtype=torch.float32)
    if pooled is not None:
        g_pooled = torch.empty_like(g)
        before((cdiv(rows, before.constants["ROWS"]),), g, pooled, index, scale, g_pooled, rows)
        g, g_bias = g_pooled, column_sum(g_pooled.permute(0, 2, 3, 1).view(rows, channels))
    size = batch, channels, height, width
    g_x = torch.empty(size, dtype=g.dtype, device=g.device, memory_format=torch.channels_last)
    grid = batch * height, cdiv(width, unpool.constants["COLUMNS"])
    unpool(grid, g, index, g_x, height, width, out_height, out_width)
    return g_x, g_bias


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    features, bias, _, ctx.pixel_scale = inputs
    pooled, index, scale = output
    ctx.size, ctx.bias_dtype = features.shape[2:], None if bias is None else bias.dtype
    ctx.mark_non_differentiable(index, scale)
    ctx.save_for_backward(index, scale, None if bias is None else pooled)


def _backward(ctx: Any, gradients: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    g_x, g_bias = gradients(g, *ctx.saved_tensors, *ctx.size, ctx.pixel_scale)
    return g_x, None if ctx.bias_dtype is None else dispatch.cast(g_bias, ctx.bias_dtype), None, None


_max_pool = FusedOp("max_pool", _forward, _gradients, _setup, _backward)


def _is_usual_pool(pool: nn.Module) -> bool:
    """Whether this is ResNet's max pooling, 3x3 of stride 2, without hooks."""
    if type(pool) is not nn.MaxPool2d or pool.ceil_mode or pool.return_indices or not dispatch.is_plain(pool):
        return False
    return (pool.kernel_size, pool.stride, pool.padding, pool.dilation) == (3, 2, 1, 1)


def _supports_max_pool(features: Tensor, pool: nn.Module) -> bool:
    if not dispatch.on_gpu(features) or not dispatch.is_training() or not _is_usual_pool(pool):
        return False
    return features.shape[1] <= MAX_CHANNELS and dispatch.is_channels_last(features)


@register_op("max_pool", reference=max_pool_reference, supports=_supports_max_pool)
def max_pool(features: Tensor, pool: nn.Module) -> Tensor:
    return _max_pool(features, None, None, 1.0)[0]


def _pools_in_kernel(images: Tensor, layer: nn.Module, norm: nn.Module, pool: nn.Module) -> bool:
    inference = is_eager_inference(images, (layer,), (norm,)) and _is_usual_pool(pool)
    return inference and isinstance(layer, nn.Conv2d) and layer.out_channels <= MAX_CHANNELS


@register_op("conv_norm_relu_pool", reference=conv_norm_relu_pool_reference, supports=_pools_in_kernel)
def conv_norm_relu_pool(images: Tensor, layer: Any, norm: nn.Module, pool: nn.Module) -> Tensor:
    return _run_pool(convolve(images, layer), fixed_norm(norm, layer.bias), True, None, 1.0, False)[0]


@conv_norm_relu_pool.add("composed", lambda images, *_: dispatch.on_gpu(images))
def _conv_norm_relu_pool(images: Tensor, layer: nn.Module, norm: nn.Module, pool: nn.Module) -> Tensor:
    """The operations after each other; each decides by itself what it can fuse."""
    return max_pool(norm_act(conv(images, layer), norm, act="relu"), pool)


def _supports_pixel_norm(images: Tensor, layer: nn.Module, norm: nn.Module) -> bool:
    """In eager mode, and in training under torch.compile."""
    if not dispatch.on_gpu(images) or type(layer) is not nn.Conv2d or layer.out_channels > MAX_CHANNELS:
        return False
    if layer.bias is None or not hasattr(norm, "pixel_norm_constants") or not dispatch.is_plain(layer, norm):
        return False
    return dispatch.is_training() or not dispatch.is_compiling()


@register_op("conv_pool_relu", reference=conv_pool_relu_reference, supports=_supports_pixel_norm)
def conv_pool_relu(images: Tensor, layer: Any, norm: Any) -> Tensor:
    eps, scale = norm.pixel_norm_constants(layer.out_channels)
    raw = convolve(images, layer)
    if dispatch.is_training():
        return _max_pool(raw, layer.bias, eps, scale)[0]
    return _run_pool(raw, FixedNorm(layer.bias), True, eps, scale, False)[0]


@conv_pool_relu.add("blocks", lambda images, layer, norm: is_stem_conv(images, layer))
def _conv_pool_relu_blocks(images: Tensor, layer: Any, norm: nn.Module) -> Tensor:
    """Inference under torch.compile: the bias is added after the pooling, which gives the same result."""
    pooled = F.max_pool2d(convolve(images, layer), 3, stride=2, padding=1)
    pooled = pooled if layer.bias is None else pooled + layer.bias.to(pooled.dtype).view(-1, 1, 1)
    return norm(F.relu(pooled))
