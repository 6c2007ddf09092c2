"""Softmax over the pixels of a map, a cluster a row, and its gradient: one pass each, whatever the length.

A compiler reads such long rows twice and more. And it writes them one right behind the other, where the library has
fast products in half precision only for matrices whose rows start at multiples of 16 bytes: averaging 14 x 14 pixels
by an assignment to 100 clusters takes 25 µs, averaging 28 x 28 takes 20. So rows of the answer have gaps between them
where they need some. The scores' gradient has none.
"""

import torch
from torch import Tensor

from saccade.kernels import HAS_TRITON, learns
from saccade.kernels.known import describe
from saccade.kernels.launch import Launch, planned
from saccade.kernels.sizes import parts, power_of_2

LONGEST = 16384  # pixels of a row that one program holds
TOGETHER = 8  # values of two bytes in sixteen


def is_held(scores: Tensor) -> bool:
    """Whether these (B, M, N) have rows that a program can hold, in one piece."""
    return scores.numel() > 0 and scores.shape[2] <= LONGEST and scores.is_contiguous()


def pixel_softmax_twin(scores: Tensor) -> Tensor:
    """The same by the library. The type is named because autocast would otherwise answer in float32."""
    return scores.softmax(-1, dtype=scores.dtype)


def with_gaps(scores: Tensor) -> Tensor:
    """As large as these, with nothing in it, and rows that start at multiples of 16 bytes."""
    batch, rows, length = scores.shape
    return scores.new_empty(batch, rows, TOGETHER * parts(length, TOGETHER))[:, :, :length]


if HAS_TRITON:
    import triton
    import triton.language as tl
    from torch.library import custom_op

    @triton.jit
    def _forward_kernel(x_pointer, y_pointer, length, step, LENGTH: tl.constexpr):
        """y = softmax(x), a row to a program; `step` is from row to row in y."""
        row, at = tl.program_id(0).to(tl.int64), tl.arange(0, LENGTH)
        known = at < length
        x = tl.load(x_pointer + row * length + at, mask=known, other=float("-inf")).to(tl.float32)
        y = tl.exp(x - tl.max(x, 0))
        y = y * (1 / tl.sum(y, 0))
        tl.store(y_pointer + row * step + at, y.to(y_pointer.dtype.element_ty), mask=known)

    @triton.jit
    def _backward_kernel(g_pointer, y_pointer, d_pointer, length, step, LENGTH: tl.constexpr):
        row, at = tl.program_id(0).to(tl.int64), tl.arange(0, LENGTH)
        known = at < length
        g = tl.load(g_pointer + row * length + at, mask=known, other=0.0).to(tl.float32)
        y = tl.load(y_pointer + row * step + at, mask=known, other=0.0).to(tl.float32)
        d = y * (g - tl.sum(g * y, 0))
        tl.store(d_pointer + row * length + at, d.to(d_pointer.dtype.element_ty), mask=known)

    @planned
    def _starting(back: bool, rows: int, length: int, step: int) -> Launch:
        wide = power_of_2(length)
        warps = min(16, max(1, wide // 512))
        kernel = _backward_kernel if back else _forward_kernel
        return Launch(kernel, (rows,), length, step, LENGTH=wide, num_warps=warps)

    def _softmax(scores: Tensor) -> Tensor:
        scores = scores.contiguous()
        batch, rows, length = scores.shape
        found = with_gaps(scores)
        _starting(False, batch * rows, length, found.stride(1))(scores, found)
        return found

    def _gradient(g: Tensor, found: Tensor) -> Tensor:
        """found: the answer itself, with its gaps or, as a compiler may hand it on, without."""
        batch, rows, length = found.shape
        step = found.stride(1)
        if found.stride() != (rows * step, step, 1):
            found, step = found.contiguous(), length
        to_scores = torch.empty(batch, rows, length, dtype=found.dtype, device=found.device)
        _starting(True, batch * rows, length, step)(g.contiguous(), found, to_scores)
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
    describe(_op, with_gaps)
    describe(_gradient_op, lambda g, found: found.new_empty(found.shape))

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
