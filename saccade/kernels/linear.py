"""A linear layer that learns, in half precision: the gradient of its bias at the memory's speed.

Forward and the two products of backward are the library's. Its sum over the rows of a gradient, hundreds of thousands
of them of a few hundred channels, takes five times as long as reading them does.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels import HAS_TRITON
from saccade.kernels.launch import start

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


def column_sum(rows: Tensor) -> Tensor:
    """rows (N, C), contiguous -> sums (C), in float32."""
    count, channels = rows.shape
    width = min(128, triton.next_power_of_2(channels))
    tile = dict(ROWS=max(1, min(8192 // width, triton.next_power_of_2(count))), CHANNELS=width, num_warps=8)
    across = triton.cdiv(channels, width)
    programs = max(1, min(triton.cdiv(count, tile["ROWS"]), PROGRAMS // across))
    partial = torch.empty(programs, channels, dtype=torch.float32, device=rows.device)
    start(_sum_kernel, (programs, across), rows, partial, count, channels, programs * tile["ROWS"], **tile)
    return partial.sum(0)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtypes = x.dtype, weight.dtype, bias.dtype
        x, weight = x.to(dtype), weight.to(dtype)
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, weight, bias.to(dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g: Tensor):
        x, weight = ctx.saved_tensors
        rows = g.contiguous().flatten(0, -2)
        to_x, to_weight, to_bias = ctx.dtypes
        with torch.autocast(x.device.type, enabled=False):
            g_x = (rows @ weight).view(x.shape).to(to_x) if ctx.needs_input_grad[0] else None
            g_weight = (rows.t() @ x.flatten(0, -2)).to(to_weight)
        return g_x, g_weight, column_sum(rows).to(to_bias), None


def linear(x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """x (…, C) -> (…, D), computed in `dtype`."""
    return _Linear.apply(x, weight, bias, dtype)
