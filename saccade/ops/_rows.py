"""Kernels over channels-last features seen as rows of channels (N, C): their tiles, and sums over rows.

A run-time channel count would hide from Triton that rows are aligned, and a constant one would compile every kernel
once per width. So kernels take `units`, and channels = units * UNIT with a constant UNIT that divides the width.
"""

from typing import no_type_check

import torch
from torch import Tensor

from saccade.ops._launch import HAS_TRITON, Kernel, cdiv, collects_specializations, jit, next_power_of_2, variant

PROGRAMS = 528  # of a kernel that sums over rows: four per multiprocessor of an H200
MAX_ROWS = 1024  # that one program sums up

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def row_tile(rows, channels, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
        """Channels (1, C) of this program and their mask, offsets (R, C) into the features and their mask."""
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        valid = channel < channels
        return channel, valid, row * channels + channel, (row < rows) & valid

    @jit
    @no_type_check
    def _column_sum_kernel(
        x_ptr, sums_ptr, rows, units, UNIT: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr
    ):  # fmt: skip
        """Sums over the rows of each program: sums (programs, C)."""
        channels = units * UNIT
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        total = tl.zeros((ROWS, CHANNELS), tl.float32)
        for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
            row = first + tl.arange(0, ROWS)[:, None]
            mask = (row < rows) & (channel < channels)
            total += tl.load(x_ptr + row.to(tl.int64) * channels + channel, mask=mask, other=0.0).to(tl.float32)
        target = sums_ptr + tl.program_id(0) * channels + channel
        tl.store(target, tl.sum(total, 0)[None, :], mask=channel < channels)


def channel_unit(channels: int) -> int:
    """The constant divisor of a channel count: 16, 8 or 1."""
    return 16 if channels % 16 == 0 else 8 if channels % 8 == 0 else 1


def tile_of(channels: int, elements: int = 4096) -> dict[str, int]:
    """The tile of a program: so many elements, of at most 128 channels."""
    width = min(128, next_power_of_2(channels))
    return dict(UNIT=channel_unit(channels), ROWS=elements // width, CHANNELS=width)


def row_grid(kernel: Kernel, rows: int, channels: int) -> tuple[int, int]:
    """Programs that cover all rows and channels."""
    return cdiv(rows, kernel.constants["ROWS"]), cdiv(channels, kernel.constants["CHANNELS"])


def sum_grid(kernel: Kernel, rows: int, channels: int) -> tuple[int, int]:
    """The same for a kernel that sums over rows: fewer programs, each of which steps over many rows."""
    blocks, across = row_grid(kernel, rows, channels)
    return max(1, min(blocks, PROGRAMS // across)), across


def units_and_step(kernel: Kernel, grid: tuple[int, int], channels: int) -> tuple[int, int]:
    """Channel units, and the rows that a program of a summing kernel steps over."""
    return channels // kernel.constants["UNIT"], grid[0] * kernel.constants["ROWS"]


@variant
def _column_sum(unit: int, width: int, warps: int) -> Kernel:
    return Kernel(_column_sum_kernel, UNIT=unit, ROWS=1024 * warps // width, CHANNELS=width, num_warps=warps)


def column_sum(rows: Tensor) -> Tensor:
    """Sums (C) in float32 over rows (N, C), contiguous.

    ATen takes five times as long as reading hundreds of thousands of rows, and two launches for a few hundred.
    """
    count, channels = rows.shape
    unit = channel_unit(channels)
    if count > MAX_ROWS or collects_specializations():  # a pass over small images compiles what larger ones need
        kernel = _column_sum(unit, min(128, next_power_of_2(channels)), 8)
        across = cdiv(channels, kernel.constants["CHANNELS"])
        programs = min(cdiv(count, kernel.constants["ROWS"]), max(1, PROGRAMS // across))
        partial = torch.empty(programs, channels, dtype=torch.float32, device=rows.device)
        kernel((programs, across), rows, partial, count, channels // unit)
        rows, count = partial, programs
    sums = torch.empty(channels, dtype=torch.float32, device=rows.device)
    _column_sum(unit, 32, 4)((1, cdiv(channels, 32)), rows, sums, count, channels // unit)  # narrow: more programs
    return sums
