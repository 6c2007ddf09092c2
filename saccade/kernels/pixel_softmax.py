"""Softmax over the pixels of a map, a cluster a row, and its gradient: one pass each, whatever the length.

A compiler reads such long rows twice and more.
"""

import torch
from torch import Tensor

from saccade.kernels import HAS_TRITON, contiguous_like, learns
from saccade.kernels.known import describe
from saccade.kernels.launch import Launch, planned
from saccade.kernels.sizes import power_of_2

LONGEST = 16384  # pixels of a row that one program holds


def is_held(scores: Tensor) -> bool:
    """Whether these (B, M, N) have rows that a program can hold, in one piece."""
    return scores.numel() > 0 and scores.shape[2] <= LONGEST and scores.is_contiguous()


def pixel_softmax_twin(scores: Tensor) -> Tensor:
    """The same by the library. The type is named because autocast would otherwise answer in float32."""
    return scores.softmax(-1, dtype=scores.dtype)


if HAS_TRITON:
    import triton
    import triton.language as tl
    from torch.library import custom_op

    @triton.jit
    def _forward_kernel(x_pointer, y_pointer, length, LENGTH: tl.constexpr):
        """y = softmax(x), a row to a program."""
        row, at = tl.program_id(0).to(tl.int64), tl.arange(0, LENGTH)
        known = at < length
        x = tl.load(x_pointer + row * length + at, mask=known, other=float("-inf")).to(tl.float32)
        y = tl.exp(x - tl.max(x, 0))
        y = y * (1 / tl.sum(y, 0))
        tl.store(y_pointer + row * length + at, y.to(y_pointer.dtype.element_ty), mask=known)

    @triton.jit
    def _backward_kernel(g_pointer, y_pointer, d_pointer, length, LENGTH: tl.constexpr):
        row, at = tl.program_id(0).to(tl.int64), tl.arange(0, LENGTH)
        known = at < length
        g = tl.load(g_pointer + row * length + at, mask=known, other=0.0).to(tl.float32)
        y = tl.load(y_pointer + row * length + at, mask=known, other=0.0).to(tl.float32)
        d = y * (g - tl.sum(g * y, 0))
        tl.store(d_pointer + row * length + at, d.to(d_pointer.dtype.element_ty), mask=known)

    @planned
    def _starting(back: bool, rows: int, length: int) -> Launch:
        wide = power_of_2(length)
        warps = min(16, max(1, wide // 512))
        kernel = _backward_kernel if back else _forward_kernel
        return Launch(kernel, (rows,), length, LENGTH=wide, num_warps=warps)

    def _softmax(scores: Tensor) -> Tensor:
        batch, rows, length = scores.shape
        found = contiguous_like(scores)
        _starting(False, batch * rows, length)(scores.contiguous(), found)
        return found

    def _gradient(g: Tensor, found: Tensor) -> Tensor:
        batch, rows, length = found.shape
        to_scores = contiguous_like(found)
        _starting(True, batch * rows, length)(g.contiguous(), found.contiguous(), to_scores)
        return to_scores

    class _Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx, scores: Tensor) -> Tensor:
            found = _softmax(scores)
            ctx.save_for_backward(found)
            return found

        @staticmethod
        def backward(ctx, g: Tensor) -> Tensor:
            return _gradient(g, *ctx.saved_tensors)

    _op = custom_op("saccade::pixel_softmax", _softmax, mutates_args=())
    _gradient_op = custom_op("saccade::pixel_softmax_backward", _gradient, mutates_args=())
    describe(_op, contiguous_like)
    describe(_gradient_op, lambda g, found: contiguous_like(found))

    def _save(ctx, inputs, output) -> None:
        ctx.save_for_backward(output)

    def _backward(ctx, g: Tensor) -> Tensor:
        return _gradient_op(g, *ctx.saved_tensors)

    _op.register_autograd(_backward, setup_context=_save)


def pixel_softmax(scores: Tensor) -> Tensor:
    """scores (B, M, N) -> weights (B, M, N) that sum to one over the last axis, in the type of the scores."""
    if torch.compiler.is_compiling():
        return _op(scores)
    return _Softmax.apply(scores) if learns(scores) else _softmax(scores)
