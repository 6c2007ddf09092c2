"""Batch norm in training, with a GELU in front of it or the sum and the ReLU behind it, over rows of channels.

The library reads the map for its statistics at half the memory's speed, and makes passes of their own for the norm,
the sum, the ReLU and their gradients. Here: one pass for the statistics, one that writes the answer; one for the two
sums of the gradient, one that writes it. Where there is no shortcut, backward finds out again from the map itself
what the ReLU let through; where there is one, from the answer, which the next layer keeps anyway. The GELU is computed
again wherever the map is read.

For eager training: a compiler fuses these steps by itself.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels import HAS_TRITON
from saccade.kernels.launch import start

PROGRAMS = 528  # of a pass that adds up: four for every multiprocessor of an H200


def batch_norm_twin(
    x: Tensor, weight: Tensor, bias: Tensor, running: tuple[Tensor, Tensor], momentum: float, eps: float,
    relu: bool = False, shortcut: Tensor | None = None, gelu: bool = False,
) -> Tensor:  # fmt: skip
    """relu(norm(gelu(x)) + shortcut), x (N, C); the running mean and variance move by `momentum`."""
    x = F.gelu(x) if gelu else x
    y = F.batch_norm(x, *running, weight, bias, True, momentum, eps)
    y = y if shortcut is None else y + shortcut
    return F.relu(y) if relu else y


if HAS_TRITON:
    import triton
    import triton.language as tl

    from saccade.kernels.gelu import gelu, gelu_slope
    from saccade.kernels.rows import cut, place

    @triton.jit
    def _read(pointer, mask, GELU: tl.constexpr):
        x = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
        if GELU:
            x = gelu(x, pointer.dtype.element_ty == tl.float32)
        return x

    @triton.jit
    def _sums_kernel(
        x_pointer, p_pointer, rows, channels, step, GELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr
    ):
        """Sums of x - k and of its square over a program's rows, k the map's first row: p (programs, 2, C).

        k is as large as the values are, so nothing is lost in the difference of the two sums later.
        """
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        held = channel < channels
        level = _read(x_pointer + channel, held, GELU)
        total = tl.zeros((ROWS, CHANNELS), tl.float32)
        squares = tl.zeros((ROWS, CHANNELS), tl.float32)
        for first in range(tl.program_id(0) * ROWS, rows, step):
            row = first + tl.arange(0, ROWS)[:, None]
            mask = (row < rows) & held
            x = _read(x_pointer + row.to(tl.int64) * channels + channel, mask, GELU)
            x = tl.where(mask, x - level, 0.0)
            total += x
            squares += x * x
        target = p_pointer + tl.program_id(0) * 2 * channels + channel
        tl.store(target, tl.sum(total, 0)[None, :], mask=held)
        tl.store(target + channels, tl.sum(squares, 0)[None, :], mask=held)

    @triton.jit
    def _statistics_kernel(
        p_pointer, x_pointer, m_pointer, r_pointer, rm_pointer, rv_pointer, rows, channels, programs, momentum, eps,
        GELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """Mean and scale (1 / deviation) of every channel from the programs' sums; the running ones move along."""
        channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        held = channel < channels
        total = tl.zeros((ROWS, CHANNELS), tl.float32)
        squares = tl.zeros((ROWS, CHANNELS), tl.float32)
        for first in range(0, programs, ROWS):
            program = first + tl.arange(0, ROWS)[:, None]
            mask = (program < programs) & held
            source = p_pointer + program * 2 * channels + channel
            total += tl.load(source, mask=mask, other=0.0)
            squares += tl.load(source + channels, mask=mask, other=0.0)
        away = tl.sum(total, 0)[None, :] / rows
        variance = tl.maximum(tl.sum(squares, 0)[None, :] / rows - away * away, 0.0)
        mean = away + _read(x_pointer + channel, held, GELU)
        tl.store(m_pointer + channel, mean, mask=held)
        tl.store(r_pointer + channel, tl.rsqrt(variance + eps), mask=held)
        before = tl.load(rm_pointer + channel, mask=held, other=0.0)
        tl.store(rm_pointer + channel, before + momentum * (mean - before), mask=held)
        before = tl.load(rv_pointer + channel, mask=held, other=0.0)
        unbiased = variance * (rows / (rows - 1.0))
        tl.store(rv_pointer + channel, before + momentum * (unbiased - before), mask=held)

    @triton.jit
    def _coefficients(w_pointer, b_pointer, m_pointer, r_pointer, channel, held):
        mean = tl.load(m_pointer + channel, mask=held, other=0.0)
        scale = tl.load(r_pointer + channel, mask=held, other=0.0)
        weight = tl.load(w_pointer + channel, mask=held, other=0.0).to(tl.float32)
        bias = tl.load(b_pointer + channel, mask=held, other=0.0).to(tl.float32)
        return mean, scale, weight, bias

    @triton.jit
    def _apply_kernel(
        x_pointer, w_pointer, b_pointer, m_pointer, r_pointer, s_pointer, y_pointer, rows, channels,
        RELU: tl.constexpr, SHORTCUT: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        channel, held, offset, mask = place(rows, channels, ROWS, CHANNELS)
        mean, scale, weight, bias = _coefficients(w_pointer, b_pointer, m_pointer, r_pointer, channel, held)
        x = _read(x_pointer + offset, mask, GELU)
        y = (x - mean) * scale * weight + bias
        if SHORTCUT:
            y += tl.load(s_pointer + offset, mask=mask, other=0.0).to(tl.float32)
        if RELU:
            y = tl.where(y < 0, 0.0, y)  # unlike a maximum, lets NaN through
        tl.store(y_pointer + offset, y.to(y_pointer.dtype.element_ty), mask=mask)

    @triton.jit
    def _let_through(g, normed, weight, bias, y_pointer, offset, mask, RELU: tl.constexpr, SHORTCUT: tl.constexpr):
        """The gradient behind the ReLU."""
        if RELU:
            if SHORTCUT:
                y = tl.load(y_pointer + offset, mask=mask, other=0.0).to(tl.float32)
            else:
                y = normed * weight + bias
            g = tl.where(y > 0, g, 0.0)
        return g

    @triton.jit
    def _gradient_sums_kernel(
        g_pointer, x_pointer, y_pointer, w_pointer, b_pointer, m_pointer, r_pointer, p_pointer, rows, channels, step,
        RELU: tl.constexpr, SHORTCUT: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """Sums of g and of g times the normed map: what weight and bias get, and what the map's gradient needs."""
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        held = channel < channels
        mean, scale, weight, bias = _coefficients(w_pointer, b_pointer, m_pointer, r_pointer, channel, held)
        to_weight = tl.zeros((ROWS, CHANNELS), tl.float32)
        to_bias = tl.zeros((ROWS, CHANNELS), tl.float32)
        for first in range(tl.program_id(0) * ROWS, rows, step):
            row = first + tl.arange(0, ROWS)[:, None]
            mask = (row < rows) & held
            offset = row.to(tl.int64) * channels + channel
            g = tl.load(g_pointer + offset, mask=mask, other=0.0).to(tl.float32)
            normed = (_read(x_pointer + offset, mask, GELU) - mean) * scale
            g = _let_through(g, normed, weight, bias, y_pointer, offset, mask, RELU, SHORTCUT)
            to_weight += g * normed
            to_bias += g
        target = p_pointer + tl.program_id(0) * 2 * channels + channel
        tl.store(target, tl.sum(to_weight, 0)[None, :], mask=held)
        tl.store(target + channels, tl.sum(to_bias, 0)[None, :], mask=held)

    @triton.jit
    def _gradient_kernel(
        g_pointer, x_pointer, y_pointer, w_pointer, b_pointer, m_pointer, r_pointer, t_pointer, d_pointer, s_pointer,
        rows, channels,
        RELU: tl.constexpr, SHORTCUT: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """Gradients of the map, in d, and of the shortcut, in s; t (2, C) are the two sums."""
        channel, held, offset, mask = place(rows, channels, ROWS, CHANNELS)
        mean, scale, weight, bias = _coefficients(w_pointer, b_pointer, m_pointer, r_pointer, channel, held)
        along = tl.load(t_pointer + channel, mask=held, other=0.0) / rows
        level = tl.load(t_pointer + channels + channel, mask=held, other=0.0) / rows
        g = tl.load(g_pointer + offset, mask=mask, other=0.0).to(tl.float32)
        normed = (_read(x_pointer + offset, mask, GELU) - mean) * scale
        g = _let_through(g, normed, weight, bias, y_pointer, offset, mask, RELU, SHORTCUT)
        if SHORTCUT:
            tl.store(s_pointer + offset, g.to(s_pointer.dtype.element_ty), mask=mask)
        d = (g - level - normed * along) * scale * weight
        if GELU:
            x = tl.load(x_pointer + offset, mask=mask, other=0.0).to(tl.float32)
            d *= gelu_slope(x, x_pointer.dtype.element_ty == tl.float32)
        tl.store(d_pointer + offset, d.to(d_pointer.dtype.element_ty), mask=mask)

    def _walking(rows: int, channels: int) -> tuple[tuple[int, int], int, dict[str, int]]:
        """`cut` for a pass that adds up: few programs, and the rows each steps over."""
        (blocks, across), tile = cut(rows, channels)
        programs = max(1, min(blocks, PROGRAMS // across))
        return (programs, across), programs * tile["ROWS"], tile | {"num_warps": 8}

    def _apply(
        x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, scale: Tensor, shortcut: Tensor | None, **switches
    ):
        rows, channels = x.shape
        y, other = torch.empty_like(x), x if shortcut is None else shortcut
        grid, tile = cut(rows, channels)
        start(_apply_kernel, grid, x, weight, bias, mean, scale, other, y, rows, channels, **switches, **tile)
        return y

    class _BatchNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias, running_mean, running_var, momentum, eps, relu, shortcut, gelu):
            rows, channels = x.shape
            grid, step, tile = _walking(rows, channels)
            partial = torch.empty(grid[0], 2, channels, dtype=torch.float32, device=x.device)
            start(_sums_kernel, grid, x, partial, rows, channels, step, GELU=gelu, **tile)
            mean, scale = torch.empty(2, channels, dtype=torch.float32, device=x.device)
            narrow = min(16, triton.next_power_of_2(channels))
            start(
                _statistics_kernel, (triton.cdiv(channels, narrow),), partial, x, mean, scale, running_mean,
                running_var, rows, channels, grid[0], momentum, eps, GELU=gelu, ROWS=128,
                CHANNELS=narrow,
            )  # fmt: skip
            ctx.switches = dict(RELU=relu, SHORTCUT=shortcut is not None, GELU=gelu)
            y = _apply(x, weight, bias, mean, scale, shortcut, **ctx.switches)
            ctx.save_for_backward(x, y if relu and shortcut is not None else x, weight, bias, mean, scale)
            ctx.mark_non_differentiable(mean, scale)
            return y, mean, scale

        @staticmethod
        def backward(ctx, g: Tensor, *_):
            x, y, weight, bias, mean, scale = ctx.saved_tensors
            rows, channels = x.shape
            g = g.contiguous()
            grid, step, tile = _walking(rows, channels)
            partial = torch.empty(grid[0], 2, channels, dtype=torch.float32, device=x.device)
            known = (g, x, y, weight, bias, mean, scale)
            start(_gradient_sums_kernel, grid, *known, partial, rows, channels, step, **ctx.switches, **tile)
            sums = partial.sum(0)  # (2, C)
            g_x = torch.empty_like(x)
            # Without a ReLU the shortcut gets g as it is.
            passed = ctx.switches["SHORTCUT"] and ctx.switches["RELU"]
            g_shortcut = torch.empty_like(g) if passed else g_x
            switches = ctx.switches | dict(SHORTCUT=passed)
            grid, tile = cut(rows, channels)
            start(_gradient_kernel, grid, *known, sums, g_x, g_shortcut, rows, channels, **switches, **tile)
            if ctx.switches["SHORTCUT"] and not passed:
                g_shortcut = g
            to_weight, to_bias = sums[0].to(weight.dtype), sums[1].to(bias.dtype)
            return g_x, to_weight, to_bias, *(None,) * 5, g_shortcut if ctx.switches["SHORTCUT"] else None, None


def batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, running: tuple[Tensor, Tensor], momentum: float, eps: float,
    relu: bool = False, shortcut: Tensor | None = None, gelu: bool = False,
) -> Tensor:  # fmt: skip
    """relu(norm(gelu(x)) + shortcut), x (N, C), contiguous; the running mean and variance move by `momentum`."""
    return _BatchNorm.apply(x, weight, bias, *running, momentum, eps, relu, shortcut, gelu)[0]


def batch_norm_again(
    x: Tensor, weight: Tensor, bias: Tensor, running: tuple[Tensor, Tensor], momentum: float, eps: float
) -> tuple[Tensor, Callable[[], Tensor]]:
    """norm(x), and a function that computes it once more from the statistics of this batch."""
    y, mean, scale = _BatchNorm.apply(x, weight, bias, *running, momentum, eps, False, None, False)
    fixed = [value.detach() for value in (x, weight, bias)]
    return y, lambda: _apply(*fixed, mean, scale, None, RELU=False, SHORTCUT=False, GELU=False)
