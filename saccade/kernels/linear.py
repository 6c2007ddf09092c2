"""A linear layer that learns, in half precision: the gradient of its bias at the memory's speed.

Forward and the two products of backward are the library's. Its sum over the rows of a gradient, hundreds of thousands
of them of a few hundred channels, takes five times as long as reading them does.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels import HALVES, HAS_TRITON, in_type
from saccade.kernels.launch import Launch, planned
from saccade.kernels.sizes import parts, power_of_2

PROGRAMS = 528  # four for every multiprocessor of an H200, each walking over many rows


def column_sum_twin(rows: Tensor) -> Tensor:
    """rows (N, C) -> sums (C), in float32."""
    return rows.sum(0, dtype=torch.float32)


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _sum_kernel(x_pointer, p_pointer, rows, channels, step, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
        """Sums over a program's rows: p (programs, C)."""
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        held = channel < channels
        total = tl.zeros((ROWS, CHANNELS), tl.float32)
        for first in range(tl.program_id(0) * ROWS, rows, step):
            row = first + tl.arange(0, ROWS)[:, None]
            place = x_pointer + row.to(tl.int64) * channels + channel
            total += tl.load(place, mask=(row < rows) & held, other=0.0).to(tl.float32)
        tl.store(p_pointer + tl.program_id(0) * channels + channel, tl.sum(total, 0)[None, :], mask=held)


@planned
def _adding(count: int, channels: int) -> tuple[int, "Launch"]:
    """Programs that add up, and their launch."""
    width = min(128, power_of_2(channels))
    tall = max(1, min(8192 // width, power_of_2(count)))
    across = parts(channels, width)
    programs = max(1, min(parts(count, tall), PROGRAMS // across))
    step, tile = programs * tall, dict(ROWS=tall, CHANNELS=width, num_warps=8)
    return programs, Launch(_sum_kernel, (programs, across), count, channels, step, **tile)


def column_sum(rows: Tensor) -> Tensor:
    """rows (N, C), contiguous -> sums (C), in float32."""
    programs, add_up = _adding(*rows.shape)
    partial = torch.empty(programs, rows.shape[1], dtype=torch.float32, device=rows.device)
    add_up(rows, partial)
    return partial.sum(0)


def without_autocast(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass whose products are of the types it hands them, inside autocast's context too."""

    @wraps(backward)
    def run(ctx, g: Tensor):
        kind = g.device.type
        if not torch.is_autocast_enabled(kind):  # entering a context costs the host more than asking
            return backward(ctx, g)
        with torch.autocast(kind, enabled=False):
            return backward(ctx, g)

    return run


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.shape, ctx.dtypes = x.shape, (x.dtype, weight.dtype, bias.dtype)
        rows, weight = in_type(x, dtype).flatten(0, -2), in_type(weight, dtype)
        ctx.save_for_backward(rows, weight)
        y = F.linear(rows, weight, in_type(bias, dtype))  # in autocast's own type, so autocast leaves them alone
        return y.view(*x.shape[:-1], y.shape[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    @without_autocast
    def backward(ctx, g: Tensor):
        rows, weight = ctx.saved_tensors
        g = g.contiguous().flatten(0, -2)
        to_x, to_weight, to_bias = ctx.dtypes
        g_x = in_type(torch.mm(g, weight).view(ctx.shape), to_x) if ctx.needs_input_grad[0] else None
        return g_x, weight_gradient(g, rows, to_weight), in_type(column_sum(g), to_bias), None


def weight_gradient(g: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """g (N, D), x (N, C) -> g' x (D, C); on a GPU the product itself answers in float32, where that is wanted."""
    if dtype == torch.float32 and g.device.type == "cuda" and g.dtype in HALVES:
        return torch.mm(g.t(), x, out_dtype=dtype)
    return in_type(torch.mm(g.t(), x), dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """x (…, C) -> (…, D), computed in `dtype`, which is autocast's where that is on."""
    return _Linear.apply(x, weight, bias, dtype)
