"""A stem's 7x7 convolution of stride 2 as a 4x4 convolution over blocks of 2x2 pixels: the same numbers.

Three channels suit no product unit: the library's kernel for them takes ten times as long as its bytes do. Blocks have
twelve, or sixteen with a colour of zeros. They are written in one pass over the pictures, with the border the
convolution needs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from saccade.kernels import HAS_TRITON
from saccade.kernels.launch import start

LANES = 16  # channels a program carries


def wide(out_channels: int) -> int:
    """Channels of a block that suit a convolution to so many: see bench/NOTES.md."""
    return 16 if out_channels % 64 == 0 else 12


def to_blocks_twin(images: Tensor, dtype: torch.dtype, channels: int) -> Tensor:
    """images (B, 3, H, W) -> blocks (B, channels, H/2 + 3, W/2 + 3); block j holds the pixels 2 j - 4 and 2 j - 3."""
    height, width = images.shape[2:]
    padded = F.pad(images, (4, 2 + width % 2, 4, 2 + height % 2, 0, channels // 4 - 3))
    blocks = F.pixel_unshuffle(padded, 2).unflatten(1, (-1, 4))  # (B, colours, 4, …)
    return blocks.transpose(1, 2).flatten(1, 2).to(dtype).contiguous(memory_format=torch.channels_last)


def block_weight(weight: Tensor, dtype: torch.dtype, channels: int) -> Tensor:
    """weight (N, 3, 7, 7) -> (N, channels, 4, 4), what it is over blocks; differentiable."""
    eight = F.pad(weight.to(dtype), (1, 0, 1, 0, 0, channels // 4 - 3))  # (N, colours, 8, 8)
    eight = eight.unflatten(3, (4, 2)).unflatten(2, (4, 2))  # (N, colours, 4, 2, 4, 2)
    return eight.permute(0, 2, 4, 3, 5, 1).flatten(3).permute(0, 3, 1, 2)  # channels last in memory


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _blocks_kernel(
        x_pointer, y_pointer, height, width, rows, columns, b_step, c_step, y_step, x_step,
        WIDE: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        COLOURS: tl.constexpr = WIDE // 4
        image, row = tl.program_id(0) // rows, tl.program_id(0) % rows
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
        lane = tl.arange(0, LANES)[None, :]
        pixel, colour = lane // COLOURS, lane % COLOURS
        down, right = 2 * row - 4 + pixel // 2, 2 * column - 4 + pixel % 2
        there = (lane < WIDE) & (colour < 3) & (down >= 0) & (down < height) & (right >= 0) & (right < width)
        place = image.to(tl.int64) * b_step + colour * c_step + down * y_step + right * x_step
        x = tl.load(x_pointer + place, mask=there, other=0.0)
        target = (tl.program_id(0).to(tl.int64) * columns + column) * WIDE + lane
        tl.store(y_pointer + target, x.to(y_pointer.dtype.element_ty), mask=(column < columns) & (lane < WIDE))


def to_blocks(images: Tensor, dtype: torch.dtype, channels: int) -> Tensor:
    """images (B, 3, H, W) in any order of memory -> blocks (B, channels, H/2 + 3, W/2 + 3), channels-last."""
    fused = _op if torch.compiler.is_compiling() else _to_blocks
    return fused(images, dtype, channels).permute(0, 3, 1, 2)


def _to_blocks(images: Tensor, dtype: torch.dtype, channels: int) -> Tensor:
    batch, _, height, width = images.shape
    rows, columns = (height + 1) // 2 + 3, (width + 1) // 2 + 3
    blocks = torch.empty(batch, rows, columns, channels, dtype=dtype, device=images.device)
    across = min(64, triton.next_power_of_2(columns))
    start(
        _blocks_kernel, (batch * rows, triton.cdiv(columns, across)), images, blocks, height, width, rows, columns,
        *images.stride(), WIDE=channels, LANES=LANES, COLUMNS=across,
    )  # fmt: skip
    return blocks


_op = custom_op("saccade::to_blocks", _to_blocks, mutates_args=())


@_op.register_fake
def _(images: Tensor, dtype: torch.dtype, channels: int) -> Tensor:
    batch, _, height, width = images.shape
    return images.new_empty(batch, (height + 1) // 2 + 3, (width + 1) // 2 + 3, channels, dtype=dtype)
