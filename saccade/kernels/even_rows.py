"""Rows that start at multiples of 16 bytes.

The library has fast products in half precision for matrices whose rows do, and slow ones for others: an assignment of
14 x 14 pixels to 100 clusters takes 25 µs to average them, where 784 pixels a row take 20. One copy with gaps between
the rows, shared by all products with it, mends that. It is an operator because a compiler would leave the gaps out.
"""

import torch
from torch import Tensor
from torch.library import custom_op

from saccade.kernels import learns

TOGETHER = 8  # values of two bytes in sixteen


def are_odd(matrices: Tensor) -> bool:
    """Whether rows of these (B, M, N) in half precision start anywhere."""
    return matrices.dtype in (torch.bfloat16, torch.float16) and matrices.shape[2] % TOGETHER > 0


def _with_gaps(matrices: Tensor) -> Tensor:
    """As large, with nothing in it."""
    batch, rows, length = matrices.shape
    return matrices.new_empty(batch, rows, length + -length % TOGETHER)[:, :, :length]


def _spread(matrices: Tensor) -> Tensor:
    return _with_gaps(matrices).copy_(matrices)


class _EvenRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, matrices: Tensor) -> Tensor:
        return _spread(matrices)

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return g


_op = custom_op("saccade::even_rows", _spread, mutates_args=())
_op.register_fake(_with_gaps)
_op.register_autograd(lambda ctx, g: g)


def even_rows(matrices: Tensor) -> Tensor:
    """The same matrices (B, M, N), in memory with gaps between their rows."""
    if torch.compiler.is_compiling():
        return _op(matrices)
    return _EvenRows.apply(matrices) if learns(matrices) else _spread(matrices)
