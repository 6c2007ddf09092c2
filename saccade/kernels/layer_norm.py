"""LayerNorm over the last axis, many short rows to a program.

The library gives every row its own block, which suits the long rows of language models; the rows here are 32 to 1024
channels of a pixel, and there are hundreds of thousands of them. Weights are read as they are stored, so nothing is
cast beforehand. Backward computes the gradient of the input and partial sums for weight and bias in one pass. In
inference the sum in front of a norm is part of the same pass (`add_norm`), or the bias of a convolution (`bias_norm`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels import HAS_TRITON, in_order_of, in_type, learns
from saccade.kernels.launch import Launch, planned, traced
from saccade.kernels.sizes import parts, power_of_2

PROGRAMS = 528  # of the backward pass: four for every multiprocessor of an H200, each walking over many rows

if HAS_TRITON:
    import triton
    import triton.language as tl
    from torch.library import custom_op, triton_op

    @triton.jit
    def _forward_kernel(
        x_pointer, w_pointer, b_pointer, y_pointer, s_pointer, rows, channels, eps,
        KEPT: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """The answer in y, mean and scale (1 / deviation) of every row in s (2, rows), where they are to be KEPT.

        Compilers (torch 2.11) hand numbers over as float64, and then all that they touch would be.
        """
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        channel = tl.arange(0, CHANNELS)[None, :]
        mask = (row < rows)[:, None] & (channel < channels)
        offset = row.to(tl.int64)[:, None] * channels + channel
        x = tl.load(x_pointer + offset, mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(x, 1) / channels
        x = tl.where(mask, x - mean[:, None], 0.0)
        scale = tl.rsqrt(tl.sum(x * x, 1) / channels + tl.cast(eps, tl.float32))
        weight = tl.load(w_pointer + channel, mask=channel < channels, other=0.0).to(tl.float32)
        bias = tl.load(b_pointer + channel, mask=channel < channels, other=0.0).to(tl.float32)
        y = x * scale[:, None] * weight + bias
        tl.store(y_pointer + offset, y.to(y_pointer.dtype.element_ty), mask=mask)
        if KEPT:
            tl.store(s_pointer + row, mean, mask=row < rows)
            tl.store(s_pointer + rows + row, scale, mask=row < rows)

    @triton.jit
    def _add_kernel(
        x_pointer, d_pointer, w_pointer, b_pointer, t_pointer, y_pointer, rows, channels, eps,
        SHARED: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """x + d in t, and its norm in y. SHARED: d is one row for all, and t is not wanted."""
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        channel = tl.arange(0, CHANNELS)[None, :]
        mask = (row < rows)[:, None] & (channel < channels)
        offset = row.to(tl.int64)[:, None] * channels + channel
        x = tl.load(x_pointer + offset, mask=mask, other=0.0).to(tl.float32)
        if SHARED:
            x += tl.load(d_pointer + channel, mask=channel < channels, other=0.0).to(tl.float32)
        else:
            x += tl.load(d_pointer + offset, mask=mask, other=0.0).to(tl.float32)
            total = x.to(t_pointer.dtype.element_ty)  # the norm is of what is written, as in two steps
            tl.store(t_pointer + offset, total, mask=mask)
            x = total.to(tl.float32)
        mean = tl.sum(x, 1) / channels
        x = tl.where(mask, x - mean[:, None], 0.0)
        scale = tl.rsqrt(tl.sum(x * x, 1) / channels + eps)
        weight = tl.load(w_pointer + channel, mask=channel < channels, other=0.0).to(tl.float32)
        bias = tl.load(b_pointer + channel, mask=channel < channels, other=0.0).to(tl.float32)
        y = x * scale[:, None] * weight + bias
        tl.store(y_pointer + offset, y.to(y_pointer.dtype.element_ty), mask=mask)

    @triton.jit
    def _backward_kernel(
        g_pointer, x_pointer, w_pointer, s_pointer, d_pointer, p_pointer, rows, channels, step,
        ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        channel = tl.arange(0, CHANNELS)[None, :]
        held = channel < channels
        weight = tl.load(w_pointer + channel, mask=held, other=0.0).to(tl.float32)
        to_weight = tl.zeros((ROWS, CHANNELS), tl.float32)
        to_bias = tl.zeros((ROWS, CHANNELS), tl.float32)
        for first in range(tl.program_id(0) * ROWS, rows, step):
            row = first + tl.arange(0, ROWS)
            mask = (row < rows)[:, None] & held
            offset = row.to(tl.int64)[:, None] * channels + channel
            g = tl.load(g_pointer + offset, mask=mask, other=0.0).to(tl.float32)
            x = tl.load(x_pointer + offset, mask=mask, other=0.0).to(tl.float32)
            mean = tl.load(s_pointer + row, mask=row < rows, other=0.0)[:, None]
            scale = tl.load(s_pointer + rows + row, mask=row < rows, other=0.0)[:, None]
            x = tl.where(mask, (x - mean) * scale, 0.0)
            to_weight += g * x
            to_bias += g
            g = g * weight
            along = tl.sum(g * x, 1)[:, None] / channels
            level = tl.sum(g, 1)[:, None] / channels
            tl.store(d_pointer + offset, ((g - x * along - level) * scale).to(d_pointer.dtype.element_ty), mask=mask)
        target = p_pointer + tl.program_id(0) * 2 * channels + channel
        tl.store(target, tl.sum(to_weight, 0)[None, :], mask=held)
        tl.store(target + channels, tl.sum(to_bias, 0)[None, :], mask=held)

    def _tile(channels: int) -> dict[str, int]:
        """Rows and channels of a program; few threads where a row is long, so that each sums more of it."""
        width = power_of_2(channels)
        elements, warps = (2048, 4) if width < 512 else (1024, 2)
        return dict(ROWS=max(1, elements // width), CHANNELS=width, num_warps=warps)

    def _gradient_tile(channels: int) -> dict[str, int]:
        """The same for gradients, of which short rows leave a thread more to carry."""
        width = power_of_2(channels)
        return dict(ROWS=max(1, 2048 // width), CHANNELS=width, num_warps=8 if width < 512 else 4)

    @planned
    def _forwards(rows: int, channels: int, eps: float, kept: bool) -> Launch:
        tile = _tile(channels)
        return Launch(_forward_kernel, (parts(rows, tile["ROWS"]),), rows, channels, eps, KEPT=kept, **tile)

    @planned
    def _backwards(rows: int, channels: int) -> tuple[int, Launch]:
        """Programs, and their launch."""
        tile = _gradient_tile(channels)
        programs = min(PROGRAMS, parts(rows, tile["ROWS"]))
        return programs, Launch(_backward_kernel, (programs,), rows, channels, programs * tile["ROWS"], **tile)

    @planned
    def _adding(rows: int, channels: int, eps: float, shared: bool) -> Launch:
        tile = _tile(channels)
        return Launch(_add_kernel, (parts(rows, tile["ROWS"]),), rows, channels, eps, SHARED=shared, **tile)

    def _add(x: Tensor, d: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x and d (…, C) -> x + d, and its norm."""
        x, d, channels = x.contiguous(), d.contiguous(), weight.shape[0]
        total, y = torch.empty_like(x), torch.empty_like(x)
        _adding(x.numel() // channels, channels, eps, False)(x, d, weight, bias, total, y)
        return total, y

    def _bias(x: Tensor, d: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """x (…, C) and d (C) -> the norm of x + d."""
        x, channels = x.contiguous(), weight.shape[0]
        y = torch.empty_like(x)
        _adding(x.numel() // channels, channels, eps, True)(x, d, weight, bias, y, y)
        return y

    _add_op = custom_op("saccade::add_norm", _add, mutates_args=())
    _bias_op = custom_op("saccade::bias_norm", _bias, mutates_args=())

    @_add_op.register_fake
    def _(x: Tensor, d: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape), x.new_empty(x.shape)

    @_bias_op.register_fake
    def _(x: Tensor, d: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return x.new_empty(x.shape)

    def _forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x (…, C), contiguous, or a channels-last map -> y like it, and mean and scale of every row (2, rows)."""
        channels = weight.shape[0]
        rows = x.numel() // channels
        y = torch.empty_like(x)
        statistics = torch.empty(2, rows, dtype=torch.float32, device=x.device)
        _forwards(rows, channels, eps, True)(x, weight, bias, y, statistics)
        return y, statistics

    def _answer(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """The same without what only gradients need."""
        channels, y = weight.shape[0], torch.empty_like(x)
        _forwards(x.numel() // channels, channels, eps, False)(x, weight, bias, y, y)
        return y

    def _gradients(g: Tensor, x: Tensor, weight: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient of x, and (2, C) of weight and bias."""
        channels = weight.shape[0]
        programs, start = _backwards(x.numel() // channels, channels)
        g_x = torch.empty_like(x)
        partial = torch.empty(programs, 2, channels, dtype=torch.float32, device=x.device)
        start(g, x, weight, statistics, g_x, partial)
        return g_x, partial.sum(0)

    class _LayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
            y, statistics = _forward(x, weight, bias, eps)
            ctx.save_for_backward(x, weight, statistics)
            return y  # alone: for further outputs autograd would make gradients of zeros

        @staticmethod
        def backward(ctx, g: Tensor):
            x, weight, statistics = ctx.saved_tensors
            g_x, shared = _gradients(in_order_of(x, g), x, weight, statistics)
            return *_shared(g_x, shared, weight), None

    _op = triton_op("saccade::layer_norm", traced(_forward), mutates_args={})
    _gradients_op = triton_op("saccade::layer_norm_backward", traced(_gradients), mutates_args={})

    def _save(ctx, inputs, output) -> None:
        x, weight, _, _ = inputs
        _, statistics = output
        ctx.save_for_backward(x, weight, statistics)
        ctx.mark_non_differentiable(statistics)

    def _backward(ctx, g: Tensor, *_):
        x, weight, statistics = ctx.saved_tensors
        return *_shared(*_gradients_op(g.contiguous(), x, weight, statistics), weight), None

    def _shared(g_x: Tensor, shared: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        to_weight, to_bias = shared.unbind()
        return g_x, in_type(to_weight, weight.dtype), in_type(to_bias, weight.dtype)

    _op.register_autograd(_backward, setup_context=_save)


class Learning(NamedTuple):
    """The norm of channels-last maps as a step of a larger function of autograd's: `saccade.ops.mlp`."""

    eps: float

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """The answer, and what the way back needs beside x."""
        return _forward(x, weight, bias, self.eps)

    def recompute(self, x: Tensor, weight: Tensor, bias: Tensor, kept: Tensor) -> Tensor:
        return _answer(x, weight, bias, self.eps)

    def gradients(self, g: Tensor, x: Tensor, weight: Tensor, bias: Tensor, kept: Tensor) -> tuple[Tensor, ...]:
        """Gradients of x, weight and bias."""
        return _shared(*_gradients(in_order_of(x, g), x, weight, kept), weight)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x (…, C), contiguous -> y (…, C)."""
    return _op(x, weight, bias, eps)[0] if torch.compiler.is_compiling() else _started(x, weight, bias, eps)


def add_norm(x: Tensor, d: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x and d (…, C), of one type -> x + d, and its norm; no gradient."""
    return (_add_op if torch.compiler.is_compiling() else _add)(x, d, weight, bias, eps)


def bias_norm(x: Tensor, d: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x (…, C), d (C) -> the norm of x + d; no gradient."""
    return (_bias_op if torch.compiler.is_compiling() else _bias)(x, d, weight, bias, eps)


def channel_norm(features: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The same over the channels of a map (B, C, H, W), channels-last in memory."""
    if torch.compiler.is_compiling():
        return _op(features.permute(0, 2, 3, 1), weight, bias, eps)[0].permute(0, 3, 1, 2)
    return _started(features, weight, bias, eps)


def _started(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return _LayerNorm.apply(x, weight, bias, eps) if learns(x, weight, bias) else _answer(x, weight, bias, eps)
