"""Tokens as weighted means of pixels: the softmax over pixels, and the product of assignment and pixels."""

from typing import Any, no_type_check

import torch
from torch import Tensor

from saccade.ops import _dispatch as dispatch
from saccade.ops._dispatch import FusedOp, register_op
from saccade.ops._launch import HAS_TRITON, Kernel, cdiv, next_power_of_2, variant

if HAS_TRITON:
    import triton.language as tl

    from saccade.ops._launch import jit

# Softmax over the pixels of an image, one row per program, forward and backward in one pass each. Inductor and ATen
# read rows of this length twice and more. The length is passed as a multiple of 4, so that Triton vectorises the loads
# without a variant per size; other lengths are left to ATen.

LENGTHS = (1024, 4096, 16384)  # tiles: the smallest that holds a row


def pixel_softmax_reference(scores: Tensor) -> Tensor:
    """Softmax over the last axis of scores (B, M, N), in their dtype; autocast would return float32."""
    return scores.softmax(-1, dtype=scores.dtype)  # PaCa Eq. 3


if HAS_TRITON:

    @jit
    @no_type_check
    def _softmax_kernel(scores_ptr, y_ptr, quads, LENGTH: tl.constexpr):
        pixel, length = tl.arange(0, LENGTH), quads * 4
        offset, mask = tl.program_id(0).to(tl.int64) * length + pixel, pixel < length
        x = tl.load(scores_ptr + offset, mask=mask, other=float("-inf")).to(tl.float32)
        y = tl.exp(x - tl.max(x, 0))
        y = y * (1 / tl.sum(y, 0))
        tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)

    @jit
    def _softmax_backward_kernel(g_ptr, y_ptr, g_scores_ptr, quads, LENGTH: tl.constexpr):
        pixel, length = tl.arange(0, LENGTH), quads * 4
        offset, mask = tl.program_id(0).to(tl.int64) * length + pixel, pixel < length
        g = tl.load(g_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        g_scores = y * (g - tl.sum(g * y, 0))
        tl.store(g_scores_ptr + offset, g_scores.to(g_scores_ptr.dtype.element_ty), mask=mask)


@variant
def _softmax_variant(backward: bool, length: int) -> Kernel:
    kernel = _softmax_backward_kernel if backward else _softmax_kernel
    return Kernel(kernel, LENGTH=length, num_warps=min(16, length // 512))


def _softmax_launch(backward: bool, *tensors: Tensor) -> None:
    batch, tokens, length = tensors[0].shape
    tile = LENGTHS[0] if length <= LENGTHS[0] else LENGTHS[1] if length <= LENGTHS[1] else LENGTHS[2]
    _softmax_variant(backward, tile)((batch * tokens,), *tensors, length // 4)


def _softmax(scores: Tensor) -> Tensor:
    y = dispatch.contiguous_like(scores)
    _softmax_launch(False, scores.contiguous(), y)
    return y


def _softmax_gradients(g: Tensor, y: Tensor) -> Tensor:
    g_scores = dispatch.contiguous_like(y)
    _softmax_launch(True, g.contiguous(), y.contiguous(), g_scores)
    return g_scores


def _softmax_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(output)


def _softmax_backward(ctx: Any, gradients: Any, g: Tensor) -> Tensor:
    return gradients(g, *ctx.saved_tensors)


_pixel_softmax = FusedOp("pixel_softmax", _softmax, _softmax_gradients, _softmax_setup, _softmax_backward)


def _supports_pixel_softmax(scores: Tensor) -> bool:
    if not dispatch.on_gpu(scores) or not scores.is_contiguous():
        return False
    return scores.shape[2] % 4 == 0 and scores.shape[2] <= LENGTHS[-1]


@register_op("pixel_softmax", reference=pixel_softmax_reference, supports=_supports_pixel_softmax)
def pixel_softmax(scores: Tensor) -> Tensor:
    return _pixel_softmax(scores)


# Products with an assignment whose number of pixels is a multiple of 4 but not of 8. cuBLAS has fast half-precision
# products for sizes that are multiples of 8: pooling 14 x 14 pixels of 320 channels for 100 tokens, batch 128, takes it
# 24 µs on an H200 and 39 µs in backward; 28 x 28 pixels of 192 channels take 20 µs. Padded rows do not help: it decides
# by the number of values, not by their alignment.

MAX_PIXELS = 4096  # one program adds up all pixels
MAX_ROWS, MAX_COLUMNS, DEPTH = 128, 128, 64  # of a program's tile of the product


def pool_pixels_reference(assignment: Tensor, pixels: Tensor) -> Tensor:
    """assignment (B, M, N) @ pixels (B, N, C) -> tokens (B, M, C)."""
    return torch.bmm(assignment, pixels)  # PaCa Eq. 2


if HAS_TRITON:

    @jit
    def _product_kernel(
        a_ptr, b_ptr, y_ptr, quads,
        SIZE: tl.constexpr, OTHER: tl.constexpr, PIXELS_ARE: tl.constexpr, A_TRANSPOSED: tl.constexpr,
        B_TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    ):  # fmt: skip
        """y (B, rows, columns) = a (B, rows, inner) @ b (B, inner, columns), one tile of one product per program.

        All are contiguous; a transposed operand has its two axes exchanged in memory. One of rows, columns and inner
        (PIXELS_ARE) is the number of pixels, 4 quads: the factor lets Triton load four values at a time. The other two
        are the constants SIZE and OTHER, in the order rows, columns, inner.
        """
        if PIXELS_ARE == "inner":
            rows, columns, inner = SIZE, OTHER, quads * 4
        elif PIXELS_ARE == "columns":
            rows, columns, inner = SIZE, quads * 4, OTHER
        else:
            rows, columns, inner = quads * 4, SIZE, OTHER
        across = (columns + COLUMNS - 1) // COLUMNS
        tiles = across * ((rows + ROWS - 1) // ROWS)
        batch, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
        row = (tile // across) * ROWS + tl.arange(0, ROWS)
        column = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
        a_ptr += batch * rows * inner
        b_ptr += batch * inner * columns
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, inner, DEPTH):
            depth = first + tl.arange(0, DEPTH)
            if A_TRANSPOSED:
                a_offset = depth[None, :] * rows + row[:, None]
            else:
                a_offset = row[:, None] * inner + depth[None, :]
            if B_TRANSPOSED:
                b_offset = column[None, :] * inner + depth[:, None]
            else:
                b_offset = depth[:, None] * columns + column[None, :]
            a = tl.load(a_ptr + a_offset, mask=(row < rows)[:, None] & (depth < inner)[None, :], other=0.0)
            b = tl.load(b_ptr + b_offset, mask=(depth < inner)[:, None] & (column < columns)[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
        offset = batch * rows * columns + row[:, None] * columns + column[None, :]
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        tl.store(y_ptr + offset, total.to(y_ptr.dtype.element_ty), mask=mask)


def _tile(size: int, largest: int) -> int:
    return min(largest, next_power_of_2(max(size, 16)))


@variant
def _product_variant(pixels_are: str, size: int, other: int, a_transposed: bool, b_transposed: bool) -> Kernel:
    """Tiles along the pixels have their largest size, whatever the number of pixels."""
    rows = MAX_ROWS if pixels_are == "rows" else _tile(size, MAX_ROWS)
    columns = MAX_COLUMNS if pixels_are == "columns" else _tile(size if pixels_are == "rows" else other, MAX_COLUMNS)
    depth = DEPTH if pixels_are == "inner" else _tile(other, DEPTH)
    return Kernel(
        _product_kernel, SIZE=size, OTHER=other, PIXELS_ARE=pixels_are, A_TRANSPOSED=a_transposed,
        B_TRANSPOSED=b_transposed, ROWS=rows, COLUMNS=columns, DEPTH=depth, num_warps=8, num_stages=3,
    )  # fmt: skip


def _multiply(kernel: Kernel, a: Tensor, b: Tensor, y: Tensor, count: int) -> None:
    batch, rows, columns = y.shape
    tiles = cdiv(rows, kernel.constants["ROWS"]) * cdiv(columns, kernel.constants["COLUMNS"])
    kernel((batch * tiles,), a, b, y, count // 4)


def _pool(assignment: Tensor, pixels: Tensor) -> Tensor:
    (batch, tokens, count), channels = assignment.shape, pixels.shape[2]
    pooled = torch.empty(batch, tokens, channels, dtype=pixels.dtype, device=pixels.device)
    kernel = _product_variant("inner", tokens, channels, False, False)
    _multiply(kernel, assignment.contiguous(), pixels.contiguous(), pooled, count)
    return pooled


def _pool_gradients(g: Tensor, assignment: Tensor, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """g (B, M, C) -> g pixelsᵀ (B, M, N) and assignmentᵀ g (B, N, C)."""
    (_, tokens, count), channels = assignment.shape, pixels.shape[2]
    g, assignment, pixels = g.contiguous(), assignment.contiguous(), pixels.contiguous()
    g_assignment, g_pixels = dispatch.contiguous_like(assignment), dispatch.contiguous_like(pixels)
    _multiply(_product_variant("columns", tokens, channels, False, True), g, pixels, g_assignment, count)
    _multiply(_product_variant("rows", channels, tokens, True, False), assignment, g, g_pixels, count)
    return g_assignment, g_pixels


def _pool_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _pool_backward(ctx: Any, gradients: Any, g: Tensor) -> tuple[Tensor, Tensor]:
    return gradients(g, *ctx.saved_tensors)


_pool_pixels = FusedOp("pool_pixels", _pool, _pool_gradients, _pool_setup, _pool_backward)


def _supports_pool_pixels(assignment: Tensor, pixels: Tensor) -> bool:
    if not dispatch.on_gpu(assignment, pixels) or not dispatch.same_half_dtype(assignment, pixels):
        return False
    return pixels.shape[1] % 8 == 4 and pixels.shape[1] <= MAX_PIXELS


@register_op("pool_pixels", reference=pool_pixels_reference, supports=_supports_pool_pixels)
def pool_pixels(assignment: Tensor, pixels: Tensor) -> Tensor:
    return _pool_pixels(assignment, pixels)
