"""Kernels over channels-last features seen as rows of channels (N, C): tiles, and the sum over all rows.

A run-time channel count would hide from Triton that rows are aligned, and a constant one would compile every kernel
once per width. So kernels take `units`, and channels = units * UNIT with a constant UNIT that divides the width.
"""

import torch
from torch import Tensor

from saccade.ops._launch import HAS_TRITON, Kernel, cdiv, next_power_of_2, variant

PROGRAMS = 528  # of a kernel that sums over rows: four per multiprocessor of an H200

if HAS_TRITON:
    import triton
    import triton.language as tl

    from saccade.ops._launch import jit

    @triton.jit
    def row_tile(rows, channels, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
        """Channels (1, C) of this program and their mask, offsets (R, C) into the features and their mask."""
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        valid = channel < channels
        return channel, valid, row * channels + channel, (row < rows) & valid

    @jit
    def _column_sum_kernel(
        x_ptr, partial_ptr, rows, units, step, UNIT: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr
    ):
        """Sums over the rows of a program: partial (programs, C)."""
        channels = units * UNIT
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        valid = channel < channels
        total = tl.zeros((ROWS, CHANNELS), tl.float32)
        for first in range(tl.program_id(0) * ROWS, rows, step):
            row = first + tl.arange(0, ROWS)[:, None]
            source = x_ptr + row.to(tl.int64) * channels + channel
            total += tl.load(source, mask=(row < rows) & valid, other=0.0).to(tl.float32)
        tl.store(partial_ptr + tl.program_id(0) * channels + channel, tl.sum(total, 0)[None, :], mask=valid)


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


@variant
def _column_sum(channels: int) -> Kernel:
    return Kernel(_column_sum_kernel, **tile_of(channels, 8192), num_warps=8)


def column_sum(rows: Tensor) -> Tensor:
    """Sum over contiguous rows (N, C) -> (C), in float32; PyTorch's takes five times as long as reading them."""
    count, channels = rows.shape
    kernel = _column_sum(channels)
    grid = sum_grid(kernel, count, channels)
    partial = torch.empty(grid[0], channels, dtype=torch.float32, device=rows.device)
    kernel(grid, rows, partial, count, *units_and_step(kernel, grid, channels))
    return partial.sum(0)


def units_and_step(kernel: Kernel, grid: tuple[int, int], channels: int) -> tuple[int, int]:
    """Channel units, and the rows that a program of a summing kernel steps over."""
    return channels // kernel.constants["UNIT"], grid[0] * kernel.constants["ROWS"]
