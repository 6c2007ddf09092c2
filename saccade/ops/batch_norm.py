"""Batch normalisation in training, with the activation and the sum around it.

cuDNN and ATen read the features for the statistics at half the memory bandwidth, and run separate passes for the norm,
the sum, the ReLU and their gradients. Here: one pass for the statistics, one that writes the output; in backward one
for the two sums of the gradient, one that writes it. Backward recomputes the GELU, and finds the sign before the ReLU
from the features, or with a shortcut from the output, which the next layer saves anyway.

For eager training, since Inductor fuses these steps itself. Running statistics are updated in place, which is why this
is an autograd.Function of its own and no torch.library operator.
"""

from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.ops import _dispatch as dispatch
from saccade.ops import _rows as rows_of
from saccade.ops._dispatch import register_op
from saccade.ops._launch import HAS_TRITON, Kernel, cdiv, jit, next_power_of_2, variant

if HAS_TRITON:
    import triton
    import triton.language as tl

    from saccade.ops._gelu import gelu, gelu_derivative
    from saccade.ops._rows import row_tile

ACTIVATIONS = {"": lambda x: x, "relu": F.relu, "gelu": F.gelu, "silu": F.silu}


def norm_act_reference(
    features: Tensor, norm: nn.Module, shortcut: Tensor | None = None, act: str = "", pre_act: str = ""
) -> Tensor:
    """act(norm(pre_act(features)) + shortcut), features (B, C, H, W) or (N, C); activations by name."""
    features = norm(ACTIVATIONS[pre_act](features))
    return ACTIVATIONS[act](features if shortcut is None else features + shortcut)


if HAS_TRITON:

    @triton.jit
    def _load_gelu(pointer, mask, GELU: tl.constexpr):
        x = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
        if GELU:
            x = gelu(x, pointer.dtype.element_ty == tl.float32)
        return x

    @jit
    @no_type_check
    def _sums_kernel(
        x_ptr, partial_ptr, rows, units, step,
        UNIT: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """Sums of x - k and of its square over the rows of a program, k the first row: partial (programs, 2, C).

        k has the magnitude of the values, so the difference of the two sums loses no digits later.
        """
        channels = units * UNIT
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        valid = channel < channels
        first_row = _load_gelu(x_ptr + channel, valid, GELU)
        total = tl.zeros((ROWS, CHANNELS), tl.float32)
        squares = tl.zeros((ROWS, CHANNELS), tl.float32)
        for first in range(tl.program_id(0) * ROWS, rows, step):
            row = first + tl.arange(0, ROWS)[:, None]
            mask = (row < rows) & valid
            x = _load_gelu(x_ptr + row.to(tl.int64) * channels + channel, mask, GELU)
            x = tl.where(mask, x - first_row, 0.0)
            total += x
            squares += x * x
        target = partial_ptr + tl.program_id(0) * 2 * channels + channel
        tl.store(target, tl.sum(total, 0)[None, :], mask=valid)
        tl.store(target + channels, tl.sum(squares, 0)[None, :], mask=valid)

    @jit
    @no_type_check
    def _statistics_kernel(
        partial_ptr, x_ptr, statistics_ptr, mean_ptr, var_ptr, batches_ptr, rows, units, programs,
        UNIT: tl.constexpr, MOMENTUM: tl.constexpr, EPS: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr,
        CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """Mean and 1 / deviation per channel, statistics (2, C); updates running statistics and the batch count."""
        channels = units * UNIT
        channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        valid = channel < channels
        total = tl.zeros((ROWS, CHANNELS), tl.float32)
        squares = tl.zeros((ROWS, CHANNELS), tl.float32)
        for first in range(0, programs, ROWS):
            program = first + tl.arange(0, ROWS)[:, None]
            mask = (program < programs) & valid
            source = partial_ptr + program * 2 * channels + channel
            total += tl.load(source, mask=mask, other=0.0)
            squares += tl.load(source + channels, mask=mask, other=0.0)
        offset = tl.sum(total, 0)[None, :] / rows
        variance = tl.maximum(tl.sum(squares, 0)[None, :] / rows - offset * offset, 0.0)
        mean = offset + _load_gelu(x_ptr + channel, valid, GELU)
        tl.store(statistics_ptr + channel, mean, mask=valid)
        tl.store(statistics_ptr + channels + channel, tl.rsqrt(variance + EPS), mask=valid)
        before = tl.load(mean_ptr + channel, mask=valid, other=0.0)
        tl.store(mean_ptr + channel, before + MOMENTUM * (mean - before), mask=valid)
        before = tl.load(var_ptr + channel, mask=valid, other=0.0)
        unbiased = variance * (rows / (rows - 1.0))
        tl.store(var_ptr + channel, before + MOMENTUM * (unbiased - before), mask=valid)
        is_first = tl.program_id(0) == 0
        tl.store(batches_ptr, tl.load(batches_ptr, mask=is_first) + 1, mask=is_first)

    @triton.jit
    def _coefficients(weight_ptr, bias_ptr, statistics_ptr, channel, channels, valid):
        mean = tl.load(statistics_ptr + channel, mask=valid, other=0.0)
        scale = tl.load(statistics_ptr + channels + channel, mask=valid, other=0.0)
        weight = tl.load(weight_ptr + channel, mask=valid, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + channel, mask=valid, other=0.0).to(tl.float32)
        return mean, scale, weight, bias

    @jit
    def _normalize_kernel(
        x_ptr, weight_ptr, bias_ptr, statistics_ptr, shortcut_ptr, y_ptr, rows, units,
        UNIT: tl.constexpr, RELU: tl.constexpr, SHORTCUT: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr,
        CHANNELS: tl.constexpr,
    ):  # fmt: skip
        channels = units * UNIT
        channel, valid, offset, mask = row_tile(rows, channels, ROWS, CHANNELS)
        mean, scale, weight, bias = _coefficients(weight_ptr, bias_ptr, statistics_ptr, channel, channels, valid)
        x = _load_gelu(x_ptr + offset, mask, GELU)
        y = (x - mean) * scale * weight + bias
        if SHORTCUT:
            y += tl.load(shortcut_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        if RELU:
            y = tl.where(y < 0, 0.0, y)  # unlike a maximum, propagates NaN
        tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)

    @triton.jit
    def _relu_gradient(g, normed, weight, bias, y_ptr, offset, mask, RELU: tl.constexpr, SHORTCUT: tl.constexpr):
        """The gradient before the ReLU."""
        if RELU:
            if SHORTCUT:
                y = tl.load(y_ptr + offset, mask=mask, other=0.0).to(tl.float32)
            else:
                y = normed * weight + bias
            g = tl.where(y > 0, g, 0.0)
        return g

    @jit
    @no_type_check
    def _gradient_sums_kernel(
        g_ptr, x_ptr, y_ptr, weight_ptr, bias_ptr, statistics_ptr, partial_ptr, rows, units, step,
        UNIT: tl.constexpr, RELU: tl.constexpr, SHORTCUT: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr,
        CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """Sums of g times the normalised features, and of g: gradients of weight and bias, needed by that of x."""
        channels = units * UNIT
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        valid = channel < channels
        mean, scale, weight, bias = _coefficients(weight_ptr, bias_ptr, statistics_ptr, channel, channels, valid)
        g_weight = tl.zeros((ROWS, CHANNELS), tl.float32)
        g_bias = tl.zeros((ROWS, CHANNELS), tl.float32)
        for first in range(tl.program_id(0) * ROWS, rows, step):
            row = first + tl.arange(0, ROWS)[:, None]
            mask = (row < rows) & valid
            offset = row.to(tl.int64) * channels + channel
            g = tl.load(g_ptr + offset, mask=mask, other=0.0).to(tl.float32)
            normed = (_load_gelu(x_ptr + offset, mask, GELU) - mean) * scale
            g = _relu_gradient(g, normed, weight, bias, y_ptr, offset, mask, RELU, SHORTCUT)
            g_weight += g * normed
            g_bias += g
        target = partial_ptr + tl.program_id(0) * 2 * channels + channel
        tl.store(target, tl.sum(g_weight, 0)[None, :], mask=valid)
        tl.store(target + channels, tl.sum(g_bias, 0)[None, :], mask=valid)

    @jit
    def _gradient_kernel(
        g_ptr, x_ptr, y_ptr, weight_ptr, bias_ptr, statistics_ptr, sums_ptr, g_x_ptr, g_shortcut_ptr, rows, units,
        UNIT: tl.constexpr, RELU: tl.constexpr, SHORTCUT: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr,
        CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """Gradients of the features and of the shortcut, from the sums (2, C) of the kernel above."""
        channels = units * UNIT
        channel, valid, offset, mask = row_tile(rows, channels, ROWS, CHANNELS)
        mean, scale, weight, bias = _coefficients(weight_ptr, bias_ptr, statistics_ptr, channel, channels, valid)
        mean_g_normed = tl.load(sums_ptr + channel, mask=valid, other=0.0) / rows
        mean_g = tl.load(sums_ptr + channels + channel, mask=valid, other=0.0) / rows
        g = tl.load(g_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        normed = (_load_gelu(x_ptr + offset, mask, GELU) - mean) * scale
        g = _relu_gradient(g, normed, weight, bias, y_ptr, offset, mask, RELU, SHORTCUT)
        if SHORTCUT:
            tl.store(g_shortcut_ptr + offset, g.to(g_shortcut_ptr.dtype.element_ty), mask=mask)
        g_x = (g - mean_g - normed * mean_g_normed) * scale * weight
        if GELU:
            x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
            g_x *= gelu_derivative(x, x_ptr.dtype.element_ty == tl.float32)
        tl.store(g_x_ptr + offset, g_x.to(g_x_ptr.dtype.element_ty), mask=mask)


@variant
def _statistics_kernels(channels: int, momentum: float, eps: float, gelu: bool) -> tuple[Kernel, Kernel]:
    """Partial sums, and the statistics they give."""
    tile = rows_of.tile_of(channels)
    narrow = dict(UNIT=tile["UNIT"], ROWS=128, CHANNELS=min(16, next_power_of_2(channels)))
    constants = dict(MOMENTUM=momentum, EPS=eps, GELU=gelu)
    return Kernel(_sums_kernel, GELU=gelu, **tile, num_warps=8), Kernel(_statistics_kernel, **constants, **narrow)


@variant
def _normalize(channels: int, relu: bool, shortcut: bool, gelu: bool) -> Kernel:
    return Kernel(_normalize_kernel, RELU=relu, SHORTCUT=shortcut, GELU=gelu, **rows_of.tile_of(channels))


@variant
def _gradient_kernels(channels: int, relu: bool, shortcut: bool, gelu: bool) -> tuple[Kernel, Kernel]:
    tile, flags = rows_of.tile_of(channels), dict(RELU=relu, GELU=gelu)
    sums = Kernel(_gradient_sums_kernel, SHORTCUT=shortcut and relu, **flags, **tile, num_warps=8)
    return sums, Kernel(_gradient_kernel, SHORTCUT=shortcut and relu, **flags, **tile)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor | None, norm: Any, relu: bool, gelu: bool
) -> tuple[Tensor, Tensor]:
    """relu(norm(gelu(x)) + shortcut), and the statistics (2, C) of the batch; updates those of the norm."""
    channels, statistics = x.shape[1], torch.empty(2, x.shape[1], dtype=torch.float32, device=x.device)
    rows = x.numel() // channels
    sums, conclude = _statistics_kernels(channels, norm.momentum, norm.eps, gelu)
    grid = rows_of.sum_grid(sums, rows, channels)
    units, step = rows_of.units_and_step(sums, grid, channels)
    partial = torch.empty(grid[0], 2, channels, dtype=torch.float32, device=x.device)
    sums(grid, x, partial, rows, units, step)
    running = norm.running_mean, norm.running_var, norm.num_batches_tracked
    narrow = cdiv(channels, conclude.constants["CHANNELS"])
    conclude((narrow,), partial, x, statistics, *running, rows, units, grid[0])
    y, kernel = torch.empty_like(x), _normalize(channels, relu, shortcut is not None, gelu)
    grid = rows_of.row_grid(kernel, rows, channels)
    kernel(grid, x, weight, bias, statistics, x if shortcut is None else shortcut, y, rows, units)
    return y, statistics


def _gradients(
    g: Tensor, x: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor, y: Tensor | None, relu: bool,
    shortcut: bool, gelu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of x, weight, bias and shortcut; y, the output, is needed for the ReLU of a sum."""
    channels, masked = x.shape[1], relu and shortcut  # without a ReLU the gradient of the shortcut is g
    rows = x.numel() // channels
    sums_kernel, kernel = _gradient_kernels(channels, relu, shortcut, gelu)
    g = dispatch.match_layout(dispatch.cast(g, x.dtype), x)
    inputs = g, x, x if y is None else y, weight, bias, statistics
    grid = rows_of.sum_grid(sums_kernel, rows, channels)
    units, step = rows_of.units_and_step(sums_kernel, grid, channels)
    partial = torch.empty(grid[0], 2, channels, dtype=torch.float32, device=x.device)
    sums_kernel(grid, *inputs, partial, rows, units, step)
    sums, g_x = rows_of.column_sum(partial.flatten(1)).view(2, channels), torch.empty_like(x)
    g_shortcut = torch.empty_like(x) if masked else g if shortcut else None
    unused = sums if g_shortcut is None or not masked else g_shortcut
    kernel(rows_of.row_grid(kernel, rows, channels), *inputs, sums, g_x, unused, rows, units)
    g_weight, g_bias = sums.unbind()
    return g_x, dispatch.cast(g_weight, weight.dtype), dispatch.cast(g_bias, bias.dtype), g_shortcut


class _NormAct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor | None, settings: tuple) -> Tensor:
        norm, relu, gelu = settings  # in a tuple: autograd inspects every argument
        y, statistics = _forward(x, weight, bias, shortcut, norm, relu, gelu)
        ctx.flags = relu, shortcut is not None, gelu
        ctx.save_for_backward(x, weight, bias, statistics, *((y,) if relu and shortcut is not None else ()))
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, statistics, *y = ctx.saved_tensors
        return *_gradients(g, x, weight, bias, statistics, y[0] if y else None, *ctx.flags), None


def _is_trainable(norm: nn.Module, features: Tensor) -> bool:
    if not norm.training or not dispatch.is_training() or dispatch.is_compiling() or not dispatch.on_gpu(features):
        return False
    if not isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d) or not dispatch.is_plain(norm):
        return False
    if not norm.affine or not norm.track_running_stats or norm.momentum is None:  # None: a cumulative average
        return False
    # PyTorch raises an error for one value per channel, which has no deviation.
    return features.numel() > features.shape[1] and dispatch.is_channels_last(features)


def _supports_norm_act(
    features: Tensor, norm: nn.Module, shortcut: Tensor | None = None, act: str = "", pre_act: str = ""
) -> bool:
    if act not in ("", "relu") or pre_act not in ("", "gelu") or not _is_trainable(norm, features):
        return False
    if shortcut is None:
        return True
    same = shortcut.dtype == features.dtype and shortcut.shape == features.shape
    return same and dispatch.is_channels_last(shortcut)


@register_op("norm_act", reference=norm_act_reference, supports=_supports_norm_act)
def norm_act(
    features: Tensor, norm: nn.Module, shortcut: Tensor | None = None, act: str = "", pre_act: str = ""
) -> Tensor:
    settings = norm, act == "relu", pre_act == "gelu"
    return _NormAct.apply(features, norm.weight, norm.bias, shortcut, settings)
