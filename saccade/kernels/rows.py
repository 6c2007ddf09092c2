"""A map as rows of channels, one tile of it to a program: what the kernels that touch every value once share."""

from saccade.kernels.launch import HAS_TRITON
from saccade.kernels.sizes import parts, power_of_2

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def place(rows, channels, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
        """Of this program's tile: its channels (1, C), which of them there are, places in the map, which there are."""
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        held = channel < channels
        return channel, held, row * channels + channel, (row < rows) & held

    def cut(rows: int, channels: int) -> tuple[tuple[int, int], dict[str, int]]:
        """Programs over a map, and the tile of each: 4096 values, of at most 128 channels."""
        width = min(128, power_of_2(channels))
        tile = dict(ROWS=max(1, min(4096 // width, power_of_2(rows))), CHANNELS=width)
        return (parts(rows, tile["ROWS"]), parts(channels, width)), tile
