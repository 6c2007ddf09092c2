"""A stem's 7x7 convolution of stride 2 as a 4x4 convolution over blocks of 2x2 pixels: the same numbers.

Three channels suit no product unit: the library's kernel for them takes ten times as long as its bytes do. Blocks have
twelve, or sixteen with a colour of zeros. They are written in one pass over the pictures, with the border the
convolution needs.

A weight that learns over twelve channels gets its gradient over the pixels (`stem_conv`): over such blocks the library
takes twenty times as long.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from saccade.kernels import HAS_TRITON, in_type
from saccade.kernels.launch import start

LANES = 16  # channels a program carries


def wide(out_channels: int) -> int:
    """Channels of a block that suit a convolution to so many: see docs/dev/performance.md."""
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

    @triton.jit
    def _weight_kernel(w_pointer, y_pointer, n_step, c_step, y_step, x_step, WIDE: tl.constexpr, LANES: tl.constexpr):
        """One of the weight's outputs over blocks: y (4, 4, WIDE); its first row and column of pixels are zeros."""
        COLOURS: tl.constexpr = WIDE // 4
        block, lane = tl.arange(0, 16)[:, None], tl.arange(0, LANES)[None, :]
        pixel, colour = lane // COLOURS, lane % COLOURS
        down, right = 2 * (block // 4) + pixel // 2 - 1, 2 * (block % 4) + pixel % 2 - 1
        there = (lane < WIDE) & (colour < 3) & (down >= 0) & (right >= 0)
        place = tl.program_id(0) * n_step + colour * c_step + down * y_step + right * x_step
        w = tl.load(w_pointer + place, mask=there, other=0.0)
        target = (tl.program_id(0) * 16 + block) * WIDE + lane
        tl.store(y_pointer + target, w.to(y_pointer.dtype.element_ty), mask=lane < WIDE)


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


def lay_out(weight: Tensor, dtype: torch.dtype, channels: int) -> Tensor:
    """`block_weight` without gradient, in one launch instead of a dozen steps."""
    laid = torch.empty(weight.shape[0], 4, 4, channels, dtype=dtype, device=weight.device)
    steps, switches = weight.stride(), dict(WIDE=channels, LANES=LANES, num_warps=1)
    start(_weight_kernel, (weight.shape[0],), weight, laid, *steps, **switches)
    return laid.permute(0, 3, 1, 2)


def stem_conv_twin(images: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """images (B, 3, H, W), weight (N, 3, 7, 7) -> (B, N, H/2, W/2), by the library."""
    return F.conv2d(images.to(dtype), weight.to(dtype), stride=2, padding=3)


def stem_conv(images: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The same over blocks, channels-last, computed in `dtype`, which is autocast's where that is on. The weight gets
    its gradient by the library, over the pixels; the images get none.
    """
    if torch.compiler.is_compiling():
        return _stem_op(images, weight, dtype).permute(0, 3, 1, 2)
    return _StemConv.apply(images, weight, dtype)


def _stem(images: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    channels = wide(weight.shape[0])
    return F.conv2d(to_blocks(images, dtype, channels), lay_out(weight, dtype, channels))


def _stem_gradient(g: Tensor, images: Tensor) -> Tensor:
    """g (B, N, H/2, W/2), images (B, 3, H, W) -> gradient of the weight (N, 3, 7, 7), in the type of g."""
    weight = g.new_empty(g.shape[1], 3, 7, 7)  # only its shape is asked for
    images = images.to(g.dtype, memory_format=torch.channels_last)  # else the large one of the two would be turned
    g = g.contiguous(memory_format=torch.channels_last)
    layout = (2, 2), (3, 3), (1, 1), False, (0, 0), 1
    return torch.ops.aten.convolution_backward(g, images, weight, None, *layout, (False, True, False))[1]


class _StemConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, images: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(images)
        ctx.dtype = weight.dtype
        return _stem(images, weight, dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g: Tensor) -> tuple[None, Tensor, None]:
        return None, in_type(_stem_gradient(g, *ctx.saved_tensors), ctx.dtype), None


def _stem_rows(images: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """images (B, 3, H, W) -> (B, H/2, W/2, N)."""
    return _stem(images, weight, dtype).permute(0, 2, 3, 1).contiguous()


def _stem_rows_gradient(g: Tensor, images: Tensor, dtype: torch.dtype) -> Tensor:
    """g (B, H/2, W/2, N) -> gradient of the weight (N, 3, 7, 7), in `dtype`."""
    return _stem_gradient(g.permute(0, 3, 1, 2), images).to(dtype, memory_format=torch.contiguous_format)


_stem_op = custom_op("saccade::stem_conv", _stem_rows, mutates_args=())
_stem_gradient_op = custom_op("saccade::stem_conv_backward", _stem_rows_gradient, mutates_args=())


@_stem_op.register_fake
def _(images: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    batch, _, height, width = images.shape
    return images.new_empty(batch, (height + 1) // 2, (width + 1) // 2, weight.shape[0], dtype=dtype)


@_stem_gradient_op.register_fake
def _(g: Tensor, images: Tensor, dtype: torch.dtype) -> Tensor:
    return g.new_empty(g.shape[3], 3, 7, 7, dtype=dtype)


def _save_stem(ctx, inputs, output) -> None:
    images, weight, _ = inputs
    ctx.save_for_backward(images)
    ctx.dtype = weight.dtype


def _stem_backward(ctx, g: Tensor) -> tuple[None, Tensor, None]:
    return None, _stem_gradient_op(g, *ctx.saved_tensors, ctx.dtype), None


_stem_op.register_autograd(_stem_backward, setup_context=_save_stem)
