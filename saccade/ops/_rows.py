"""Tiles of kernels over channels-last features seen as rows of channels (N, C).

A run-time channel count would hide from Triton that rows are aligned, and a constant one would compile every kernel
once per width. So kernels take `units`, and channels = units * UNIT with a constant UNIT that divides the width.
"""

from saccade.ops._launch import HAS_TRITON, Kernel, cdiv, next_power_of_2

PROGRAMS = 528  # of a kernel that sums over rows: four per multiprocessor of an H200

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
