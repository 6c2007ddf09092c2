"""Linear layers as one call of the library, with compilers too.

With a GELU, in its tanh form, inside the product, for inference on GPUs: compilers know that only as two steps, the
product and a pass for the GELU. And without: where rows have an odd length, compilers pad them, and the library then
adds the bias in a pass of its own. As operators of our own they are left whole.
"""

import torch
from torch import Tensor
from torch.library import custom_op


def linear_gelu(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """rows (N, C), weight (D, C), bias (D) -> gelu(rows · weightᵀ + bias), (N, D)."""
    return (_op if torch.compiler.is_compiling() else _inside)(rows, weight, bias)


def _inside(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)


def linear(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """rows (N, C), weight (D, C), bias (D) -> rows · weightᵀ + bias, (N, D); for compilers alone."""
    return _linear_op(rows, weight, bias)


def _linear(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, rows, weight.t())


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:2])


def _gradients(ctx, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, weight = ctx.saved_tensors
    return torch.mm(g, weight), torch.mm(g.t(), rows), g.sum(0)


def _fake(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0])


_op = custom_op("saccade::linear_gelu", _inside, mutates_args=())
_linear_op = custom_op("saccade::linear", _linear, mutates_args=())
_op.register_fake(_fake)
_linear_op.register_fake(_fake)
_linear_op.register_autograd(_gradients, setup_context=_save)
