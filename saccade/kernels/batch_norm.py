"""Batch norm in training, with a GELU in front of it or the sum and the ReLU behind it, over rows of channels.

The library reads the map for its statistics at half the memory's speed, and makes passes of their own for the norm,
the sum, the ReLU and their gradients. Here: one pass for the statistics, one that writes the answer; one for the two
sums of the gradient, one that writes it. Where there is no shortcut, backward finds out again from the map itself
what the ReLU let through; where there is one, from the answer, which the next layer keeps anyway. The GELU is computed
again wherever the map is read.

For eager training: a compiler fuses these steps by itself.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels import HAS_TRITON, in_order_of, in_type
from saccade.kernels.launch import Launch, planned
from saccade.kernels.sizes import parts, power_of_2

PROGRAMS = 528  # of a pass that adds up: four for every multiprocessor of an H200


def batch_norm_twin(
    x: Tensor, weight: Tensor, bias: Tensor, running: tuple[Tensor, Tensor], momentum: float, eps: float,
    relu: bool = False, shortcut: Tensor | None = None, gelu: bool = False, batches: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """relu(norm(gelu(x)) + shortcut), x (N, C, …); running mean and variance move by `momentum`, `batches` by one."""
    if batches is not None:
        batches.add_(1)
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
        p_pointer, x_pointer, s_pointer, rm_pointer, rv_pointer, n_pointer, rows, channels, programs, momentum, eps,
        GELU: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """Mean and scale (1 / deviation) of every channel, s (2, C), from the programs' sums.

        The running ones move along, and with COUNT the number of batches in n.
        """
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
        tl.store(s_pointer + channel, mean, mask=held)
        tl.store(s_pointer + channels + channel, tl.rsqrt(variance + eps), mask=held)
        before = tl.load(rm_pointer + channel, mask=held, other=0.0)
        tl.store(rm_pointer + channel, before + momentum * (mean - before), mask=held)
        before = tl.load(rv_pointer + channel, mask=held, other=0.0)
        unbiased = variance * (rows / (rows - 1.0))
        tl.store(rv_pointer + channel, before + momentum * (unbiased - before), mask=held)
        if COUNT:
            first = tl.program_id(0) == 0
            tl.store(n_pointer, tl.load(n_pointer, mask=first) + 1, mask=first)

    @triton.jit
    def _coefficients(w_pointer, b_pointer, s_pointer, channel, channels, held):
        mean = tl.load(s_pointer + channel, mask=held, other=0.0)
        scale = tl.load(s_pointer + channels + channel, mask=held, other=0.0)
        weight = tl.load(w_pointer + channel, mask=held, other=0.0).to(tl.float32)
        bias = tl.load(b_pointer + channel, mask=held, other=0.0).to(tl.float32)
        return mean, scale, weight, bias

    @triton.jit
    def _apply_kernel(
        x_pointer, w_pointer, b_pointer, s_pointer, o_pointer, y_pointer, rows, channels,
        RELU: tl.constexpr, SHORTCUT: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """The answer in y, the shortcut in o."""
        channel, held, offset, mask = place(rows, channels, ROWS, CHANNELS)
        mean, scale, weight, bias = _coefficients(w_pointer, b_pointer, s_pointer, channel, channels, held)
        x = _read(x_pointer + offset, mask, GELU)
        y = (x - mean) * scale * weight + bias
        if SHORTCUT:
            y += tl.load(o_pointer + offset, mask=mask, other=0.0).to(tl.float32)
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
        g_pointer, x_pointer, y_pointer, w_pointer, b_pointer, s_pointer, p_pointer, rows, channels, step,
        RELU: tl.constexpr, SHORTCUT: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """Sums of g and of g times the normed map: what weight and bias get, and what the map's gradient needs."""
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        held = channel < channels
        mean, scale, weight, bias = _coefficients(w_pointer, b_pointer, s_pointer, channel, channels, held)
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
        g_pointer, x_pointer, y_pointer, w_pointer, b_pointer, s_pointer, t_pointer, d_pointer, o_pointer,
        rows, channels,
        RELU: tl.constexpr, SHORTCUT: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """Gradients of the map, in d, and of the shortcut, in o; t (2, C) are the two sums."""
        channel, held, offset, mask = place(rows, channels, ROWS, CHANNELS)
        mean, scale, weight, bias = _coefficients(w_pointer, b_pointer, s_pointer, channel, channels, held)
        along = tl.load(t_pointer + channel, mask=held, other=0.0) / rows
        level = tl.load(t_pointer + channels + channel, mask=held, other=0.0) / rows
        g = tl.load(g_pointer + offset, mask=mask, other=0.0).to(tl.float32)
        normed = (_read(x_pointer + offset, mask, GELU) - mean) * scale
        g = _let_through(g, normed, weight, bias, y_pointer, offset, mask, RELU, SHORTCUT)
        if SHORTCUT:
            tl.store(o_pointer + offset, g.to(o_pointer.dtype.element_ty), mask=mask)
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

    @planned
    def _forwards(
        rows: int, channels: int, momentum: float, eps: float, gelu: bool, count: bool
    ) -> tuple[int, Launch, Launch]:
        """Programs that add up, and the two launches that make the statistics."""
        grid, step, tile = _walking(rows, channels)
        narrow = min(16, power_of_2(channels))
        add_up = Launch(_sums_kernel, grid, rows, channels, step, GELU=gelu, **tile)
        conclude = Launch(
            _statistics_kernel, (parts(channels, narrow),), rows, channels, grid[0], momentum, eps, GELU=gelu,
            COUNT=count, ROWS=128, CHANNELS=narrow,
        )  # fmt: skip
        return grid[0], add_up, conclude

    @planned
    def _apply(rows: int, channels: int, relu: bool, shortcut: bool, gelu: bool) -> Launch:
        grid, tile = cut(rows, channels)
        return Launch(_apply_kernel, grid, rows, channels, RELU=relu, SHORTCUT=shortcut, GELU=gelu, **tile)

    @planned
    def _backwards(rows: int, channels: int, relu: bool, shortcut: bool, gelu: bool) -> tuple[int, Launch, Launch]:
        """Programs that add up, the launch of these, and that of the gradient."""
        switches = dict(RELU=relu, GELU=gelu)
        grid, step, tile = _walking(rows, channels)
        add_up = Launch(_gradient_sums_kernel, grid, rows, channels, step, SHORTCUT=shortcut, **switches, **tile)
        programs = grid[0]
        grid, tile = cut(rows, channels)
        # Without a ReLU the shortcut gets g as it is.
        gradient = Launch(_gradient_kernel, grid, rows, channels, SHORTCUT=shortcut and relu, **switches, **tile)
        return programs, add_up, gradient

    def _learn(
        x: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor | None, running: tuple[Tensor, Tensor],
        momentum: float, eps: float, relu: bool, gelu: bool, batches: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The answer, and the statistics of this batch (2, C)."""
        channels, added, count = x.shape[1], shortcut is not None, batches is not None
        rows = x.numel() // channels
        programs, add_up, conclude = _forwards(rows, channels, momentum, eps, gelu, count)
        partial = torch.empty(programs, 2, channels, dtype=torch.float32, device=x.device)
        add_up(x, partial)
        statistics = torch.empty(2, channels, dtype=torch.float32, device=x.device)
        conclude(partial, x, statistics, *running, batches if count else statistics)
        y = torch.empty_like(x)
        _apply(rows, channels, relu, added, gelu)(x, weight, bias, statistics, shortcut if added else x, y)
        return y, statistics

    def _again(x: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor) -> Tensor:
        """norm(x) once more, from the statistics of its batch."""
        y = torch.empty_like(x)
        _apply(x.numel() // x.shape[1], x.shape[1], False, False, False)(x, weight, bias, statistics, x, y)
        return y

    def _differentiate(
        g: Tensor, x: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor, answer: Tensor | None = None,
        relu: bool = False, added: bool = False, gelu: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Gradients of x, weight, bias and shortcut; the answer is needed behind a ReLU of a sum."""
        channels, known = x.shape[1], answer is not None
        programs, add_up, gradient = _backwards(x.numel() // channels, channels, relu, added, gelu)
        g = in_order_of(x, g)
        inputs = g, x, answer if known else x, weight, bias, statistics
        partial = torch.empty(programs, 2, channels, dtype=torch.float32, device=x.device)
        add_up(*inputs, partial)
        sums = partial.sum(0)  # (2, C)
        g_x = torch.empty_like(x)
        g_shortcut = torch.empty_like(g) if known else g if added else None
        gradient(*inputs, sums, g_x, g_shortcut if known else g_x)
        to_weight, to_bias = sums.unbind()
        return g_x, in_type(to_weight, weight.dtype), in_type(to_bias, bias.dtype), g_shortcut

    class _BatchNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor | None, rest: tuple) -> Tensor:
            """The statistics are put into the list `kept`, if somebody wants them."""
            running, momentum, eps, relu, gelu, batches, kept = rest  # autograd looks at every argument
            y, statistics = _learn(x, weight, bias, shortcut, running, momentum, eps, relu, gelu, batches)
            ctx.switches = relu, shortcut is not None, gelu
            ctx.save_for_backward(x, weight, bias, statistics, *((y,) if relu and shortcut is not None else ()))
            if kept is not None:
                kept.append(statistics)
            return y

        @staticmethod
        def backward(ctx, g: Tensor):
            x, weight, bias, statistics, *answer = ctx.saved_tensors
            found = _differentiate(g, x, weight, bias, statistics, answer[0] if answer else None, *ctx.switches)
            return *found, None


class Learning(NamedTuple):
    """A norm of the library's as a step of a larger function of autograd's, see `saccade.ops.mlp`."""

    running: tuple[Tensor, Tensor]
    momentum: float
    eps: float
    batches: Tensor | None

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """The answer, and what the way back needs beside x."""
        return _learn(x, weight, bias, None, self.running, self.momentum, self.eps, False, False, self.batches)

    def recompute(self, x: Tensor, weight: Tensor, bias: Tensor, kept: Tensor) -> Tensor:
        return _again(x, weight, bias, kept)

    def gradients(self, g: Tensor, x: Tensor, weight: Tensor, bias: Tensor, kept: Tensor) -> tuple[Tensor, ...]:
        """Gradients of x, weight and bias."""
        return _differentiate(g, x, weight, bias, kept)[:3]


def batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, running: tuple[Tensor, Tensor], momentum: float, eps: float,
    relu: bool = False, shortcut: Tensor | None = None, gelu: bool = False, batches: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """relu(norm(gelu(x)) + shortcut), x (N, C), contiguous, or a map (B, C, H, W) with its channels last in memory.

    Running mean and variance move by `momentum`, the number of batches by one.
    """
    return _BatchNorm.apply(x, weight, bias, shortcut, (running, momentum, eps, relu, gelu, batches, None))


def batch_norm_again(
    x: Tensor, weight: Tensor, bias: Tensor, running: tuple[Tensor, Tensor], momentum: float, eps: float,
    batches: Tensor | None = None,
) -> tuple[Tensor, Callable[[], Tensor]]:  # fmt: skip
    """norm(x), and a function that computes it once more from the statistics of this batch."""
    kept: list[Tensor] = []
    y = _BatchNorm.apply(x, weight, bias, None, (running, momentum, eps, False, False, batches, kept))
    fixed = x.detach()
    return y, lambda: _again(fixed, weight, bias, kept[0])
