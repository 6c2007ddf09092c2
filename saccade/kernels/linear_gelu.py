"""A linear layer whose GELU, in its tanh form, is computed inside the library's product; for inference on GPUs.

Compilers know the library's call only as two steps, the product and a pass for the GELU. As an operator of our own they
leave it whole.
"""

import torch
from torch import Tensor
from torch.library import custom_op


def linear_gelu(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """rows (N, C), weight (D, C), bias (D) -> gelu(rows · weightᵀ + bias), (N, D)."""
    return (_op if torch.compiler.is_compiling() else _inside)(rows, weight, bias)


def _inside(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)


_op = custom_op("saccade::linear_gelu", _inside, mutates_args=())


@_op.register_fake
def _(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0])
