"""Averages of pixels by an assignment to clusters, and their gradients, where pixels come in fours but not in eights.

The library has fast products in half precision for matrices whose sides are multiples of eight. Averaging 14 x 14
pixels of 320 channels for 100 clusters, 128 times, takes it 24 µs on an H200, and 39 on the way back; averaging 28 x 28
of 192 takes 20. Rows with gaps between them do not help: it looks at how many values there are, not at where they lie.
"""

import torch
from torch import Tensor

from saccade.kernels import HALVES, HAS_TRITON, contiguous_like, learns
from saccade.kernels.known import describe
from saccade.kernels.launch import Launch, planned
from saccade.kernels.sizes import parts, power_of_2

LONGEST = 4096  # pixels up to which one program adds up all of them
TALLEST, WIDEST, DEEPEST = 128, 128, 64  # a program's part of a product, and how much of the sum it takes at once


def are_fours(assignment: Tensor, pixels: Tensor) -> bool:
    """Whether assignment (B, M, N) and pixels (B, N, C) are in half precision, and such that the library is slow."""
    count, alike = pixels.shape[1], assignment.dtype == pixels.dtype
    if not alike or assignment.dtype not in HALVES or count % 8 != 4 or count > LONGEST:
        return False
    return pixels.numel() > 0 and assignment.numel() > 0


def averages_twin(assignment: Tensor, pixels: Tensor) -> Tensor:
    """assignment (B, M, N), pixels (B, N, C) -> (B, M, C)."""
    return torch.bmm(assignment, pixels)


if HAS_TRITON:
    import triton
    import triton.language as tl
    from torch.library import custom_op

    @triton.jit
    def _product_kernel(
        a_pointer, b_pointer, y_pointer, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
        A_FLIPPED: tl.constexpr, B_FLIPPED: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
    ):  # fmt: skip
        """y (B, ROWS, COLUMNS) = a (B, ROWS, INNER) b (B, INNER, COLUMNS), one part of one product a program.

        All are contiguous; what is flipped lies in memory with its sides exchanged. Sides are constants, so that the
        compiler sees how many values it may read at once.
        """
        across: tl.constexpr = (COLUMNS + WIDE - 1) // WIDE
        tiles: tl.constexpr = across * ((ROWS + TALL - 1) // TALL)
        batch, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
        row = (tile // across) * TALL + tl.arange(0, TALL)
        column = (tile % across) * WIDE + tl.arange(0, WIDE)
        a_pointer += batch * (ROWS * INNER)
        b_pointer += batch * (INNER * COLUMNS)
        total = tl.zeros((TALL, WIDE), tl.float32)
        for first in range(0, INNER, DEEP):
            inner = first + tl.arange(0, DEEP)
            if A_FLIPPED:
                a_at = inner[None, :] * ROWS + row[:, None]
            else:
                a_at = row[:, None] * INNER + inner[None, :]
            if B_FLIPPED:
                b_at = column[None, :] * INNER + inner[:, None]
            else:
                b_at = inner[:, None] * COLUMNS + column[None, :]
            a = tl.load(a_pointer + a_at, mask=(row < ROWS)[:, None] & (inner < INNER)[None, :], other=0.0)
            b = tl.load(b_pointer + b_at, mask=(inner < INNER)[:, None] & (column < COLUMNS)[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
        at = batch * (ROWS * COLUMNS) + row[:, None] * COLUMNS + column[None, :]
        held = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
        tl.store(y_pointer + at, total.to(y_pointer.dtype.element_ty), mask=held)

    @planned
    def _multiplying(batch: int, rows: int, columns: int, inner: int, a_flipped: bool, b_flipped: bool) -> Launch:
        tall, wide = min(TALLEST, power_of_2(max(rows, 16))), min(WIDEST, power_of_2(max(columns, 16)))
        deep = min(DEEPEST, power_of_2(max(inner, 16)))
        sides = dict(ROWS=rows, COLUMNS=columns, INNER=inner, A_FLIPPED=a_flipped, B_FLIPPED=b_flipped)
        tile = dict(TALL=tall, WIDE=wide, DEEP=deep, num_warps=8, num_stages=3)
        return Launch(_product_kernel, (batch * parts(rows, tall) * parts(columns, wide),), **sides, **tile)

    def _averages(assignment: Tensor, pixels: Tensor) -> Tensor:
        (batch, tokens, count), channels = assignment.shape, pixels.shape[2]
        found = torch.empty(batch, tokens, channels, dtype=pixels.dtype, device=pixels.device)
        multiply = _multiplying(batch, tokens, channels, count, False, False)
        multiply(assignment.contiguous(), pixels.contiguous(), found)
        return found

    def _gradients(g: Tensor, assignment: Tensor, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """g (B, M, C) -> of the assignment, g pixels', and of the pixels, assignment' g."""
        (batch, tokens, count), channels = assignment.shape, pixels.shape[2]
        g, assignment, pixels = g.contiguous(), assignment.contiguous(), pixels.contiguous()
        to_assignment = torch.empty_like(assignment)  # contiguous, as they are by now
        _multiplying(batch, tokens, count, channels, False, True)(g, pixels, to_assignment)
        to_pixels = torch.empty_like(pixels)
        _multiplying(batch, count, channels, tokens, True, False)(assignment, g, to_pixels)
        return to_assignment, to_pixels

    class _Averages(torch.autograd.Function):
        @staticmethod
        def forward(ctx, assignment: Tensor, pixels: Tensor) -> Tensor:
            ctx.save_for_backward(assignment, pixels)
            return _averages(assignment, pixels)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor]:
            return _gradients(g, *ctx.saved_tensors)

    _op = custom_op("saccade::averages", _averages, mutates_args=())
    _gradients_op = custom_op("saccade::averages_backward", _gradients, mutates_args=())
    describe(_op, lambda assignment, pixels: pixels.new_empty(*assignment.shape[:2], pixels.shape[2]))
    describe(_gradients_op, lambda g, assignment, pixels: (contiguous_like(assignment), contiguous_like(pixels)))

    def _save(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    def _backward(ctx, g: Tensor) -> tuple[Tensor, Tensor]:
        return _gradients_op(g, *ctx.saved_tensors)

    _op.register_autograd(_backward, setup_context=_save)


def averages(assignment: Tensor, pixels: Tensor) -> Tensor:
    """assignment (B, M, N), pixels (B, N, C) -> (B, M, C), see `are_fours`."""
    if torch.compiler.is_compiling():
        return _op(assignment, pixels)
    return _Averages.apply(assignment, pixels) if learns(assignment, pixels) else _averages(assignment, pixels)
