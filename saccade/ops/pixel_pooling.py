"""Tokens as weighted means of pixels: the softmax over pixels, and the product of assignment and pixels."""

from typing import Any, no_type_check

import torch
from torch import Tensor

from saccade.ops import _dispatch as dispatch
from saccade.ops._dispatch import FusedOp, register_op
from saccade.ops._launch import HAS_TRITON, Kernel, jit, variant

if HAS_TRITON:
    import triton.language as tl

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


def pool_pixels(assignment: Tensor, pixels: Tensor) -> Tensor:
    """assignment (B, M, N) @ pixels (B, N, C) -> tokens (B, M, C).

    cuBLAS is slow where N is no multiple of 8 (24 instead of 11 µs for 14 x 14 pixels, batch 128, H200), but a kernel
    for these sizes saved 1.5 % of an inference pass of PaCa-S and 0.9 % of a training step: not enough to have one.
    """
    return torch.bmm(assignment, pixels)  # PaCa Eq. 2
