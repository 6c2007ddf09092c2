"""Sums over rows, for the kernels of this package; `saccade.ops.linear.column_sum` replaces it."""

import torch
from torch import Tensor

from saccade.kernels import HAS_TRITON
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
