"""Linear layers: with GELU, in groups of channels, and with faster gradients in half precision."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.ops import _dispatch as dispatch
from saccade.ops._dispatch import FusedOp, opaque_op, register_op
from saccade.ops._launch import HAS_TRITON, Kernel, cdiv, jit, next_power_of_2, variant
from saccade.ops._rows import PROGRAMS, column_sum
from saccade.ops._weights import cached_layout, cast_to, cast_weight, cast_weights, has_casts

if HAS_TRITON:
    import triton
    import triton.language as tl

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
MIN_ROWS = 16384  # from which the faster sum of backward pays for the Python around it

# linear: in half-precision training the two products of backward are cuBLAS's, and the sum over rows is `column_sum`.


def linear_reference(vectors: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """vectors (..., C), weight (D, C) -> (..., D)."""
    return F.linear(vectors, weight, bias)


def weight_gradient(g: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """g (N, D), x (N, C) -> gᵀ x (D, C); cuBLAS writes the float32 gradient of a half-precision product itself."""
    if dtype == torch.float32 and g.device.type == "cuda" and g.dtype in dispatch.HALF_DTYPES:
        return torch.mm(g.t(), x, out_dtype=dtype)
    return dispatch.cast(torch.mm(g.t(), x), dtype)


def without_autocast(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a backward pass that casts explicitly, inside the context of autocast too."""

    @wraps(backward)
    def run(ctx: Any, g: Tensor) -> Any:
        kind = g.device.type
        if not torch.is_autocast_enabled(kind):  # entering a context costs more CPU time than the test
            return backward(ctx, g)
        with torch.autocast(kind, enabled=False):
            return backward(ctx, g)

    return run


class _TrainLinear(torch.autograd.Function):
    """A linear layer computed in `dtype`, which is autocast's where that is on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.shape, ctx.dtypes = x.shape, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        rows, (weight, bias) = dispatch.cast(x, dtype).flatten(0, -2), cast_to(dtype, weight, bias)
        ctx.save_for_backward(rows, weight)
        y = F.linear(rows, weight, bias)
        return y.view(*x.shape[:-1], y.shape[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    @without_autocast
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        g = g.contiguous().flatten(0, -2)
        g_x = dispatch.cast(torch.mm(g, weight).view(ctx.shape), x_dtype) if ctx.needs_input_grad[0] else None
        g_bias = None if bias_dtype is None else dispatch.cast(column_sum(g), bias_dtype)
        return g_x, weight_gradient(g, rows, weight_dtype), g_bias, None


def _trains_in_half(vectors: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    if not dispatch.is_training() or dispatch.is_compiling() or not dispatch.on_gpu(vectors) or vectors.ndim < 2:
        return False
    if not dispatch.computes_in_half(vectors) or not weight.requires_grad or not (bias is None or bias.requires_grad):
        return False
    # Few rows of weights in half precision already: ATen's functions cost less CPU time than one in Python.
    return weight.dtype == torch.float32 or vectors.numel() >= MIN_ROWS * vectors.shape[-1] > 0


@register_op("linear", reference=linear_reference, supports=_trains_in_half)
def linear(vectors: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _TrainLinear.apply(vectors, weight, bias, dispatch.compute_dtype(vectors))


def _supports_onednn(vectors: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    if not HAS_ONEDNN or not dispatch.on_cpu_inference(vectors):
        return False
    return type(weight) in (nn.Parameter, Tensor) and weight.dtype == torch.float32  # no quantised subclass


def linear_onednn(vectors: Tensor, weight: Tensor, bias: Tensor | None = None, gelu: bool = False) -> Tensor:
    """ATen adds the bias in a pass of its own; oneDNN adds it, and applies GELU, inside the product."""
    act = ("gelu", [], "none") if gelu else ("none", [], "")
    return torch.ops.mkldnn._linear_pointwise(vectors, weight, bias, *act)


linear.add("onednn", supports=_supports_onednn)(linear_onednn)


@linear.add("cast_weights", supports=lambda vectors, *weights: has_casts())
def _linear_of_casts(vectors: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(vectors, *cast_weights(weight, bias))


# linear_gelu: cuBLAS applies the GELU inside the product, in its tanh form: at most 5e-4 from the exact one, where the
# spacing of half-precision dtypes is 2e-3 and more. Inductor fuses bias and GELU itself.


def linear_gelu_reference(vectors: Tensor, layer: nn.Module) -> Tensor:
    """gelu(layer(vectors)), vectors (..., C) -> (..., D)."""
    return F.gelu(layer(vectors))


def _is_half_product(vectors: Tensor, layer: nn.Module) -> bool:
    """Whether this is a plain linear layer with bias, computed in half precision on a GPU."""
    if not dispatch.on_gpu(vectors) or not isinstance(layer, nn.Linear) or not dispatch.is_plain(layer):
        return False
    return layer.bias is not None and dispatch.computes_in_half(vectors)


def _supports_linear_gelu(vectors: Tensor, layer: nn.Module) -> bool:
    if dispatch.is_training() or dispatch.is_compiling() or not _is_half_product(vectors, layer):
        return False
    return vectors.is_contiguous()


@register_op("linear_gelu", reference=linear_gelu_reference, supports=_supports_linear_gelu, implementation="cublas")
def linear_gelu(vectors: Tensor, layer: nn.Module) -> Tensor:
    rows, weight, bias = _product_operands(vectors, layer)
    return torch._addmm_activation(bias, rows, weight.t(), use_gelu=True).view(*vectors.shape[:-1], weight.shape[0])


def _product_operands(vectors: Tensor, layer: Any) -> tuple[Tensor, ...]:
    """Rows (N, C), weight and bias in the compute dtype."""
    operands = vectors.flatten(0, -2), *cast_weights(layer.weight, layer.bias)
    return tuple(dispatch.cast(operand, dispatch.compute_dtype(vectors)) for operand in operands)


# linear_fixed_layout: Inductor pads the 10512-wide rows of SparseFormer's adaptive decoder, and then adds the bias by a
# copy: 0.78 ms per pass on an H200 (batch 128). An operator that Inductor cannot take apart keeps cuBLAS's one call.


def linear_fixed_layout_reference(vectors: Tensor, layer: nn.Module) -> Tensor:
    """layer(vectors), vectors (..., C) -> (..., D), without padding of rows by torch.compile."""
    return layer(vectors)


def _fixed_layout_forward(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, rows, weight.t())


def _fixed_layout_fake(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0])


def _fixed_layout_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _fixed_layout_backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, weight = ctx.saved_tensors
    return torch.mm(g, weight), torch.mm(g.t(), rows), g.sum(0)


_fixed_layout = opaque_op("linear_fixed_layout", _fixed_layout_forward, _fixed_layout_fake)
_fixed_layout.register_autograd(_fixed_layout_backward, setup_context=_fixed_layout_setup)


@register_op(
    "linear_fixed_layout",
    reference=linear_fixed_layout_reference,
    supports=lambda vectors, layer: dispatch.is_compiling() and _is_half_product(vectors, layer),
    implementation="opaque",
)
def linear_fixed_layout(vectors: Tensor, layer: nn.Module) -> Tensor:
    rows, weight, bias = _product_operands(vectors, layer)
    return _fixed_layout(rows, weight, bias).view(*vectors.shape[:-1], weight.shape[0])


# grouped_linear: a batched product reads and writes strided parts of rows at a fraction of the memory bandwidth. The
# matrix of a narrow group fits into shared memory, so a program takes some rows of one group. Wide groups, such as the
# two of VT's queries and keys, are one dense product with zeros between the groups: half-precision products wait for
# memory, not for arithmetic.

MAX_GROUP_DIM = 128


def grouped_linear_reference(vectors: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """vectors (B, N, C), weight (groups, C/groups, D/groups), bias (D) -> (B, N, D): a grouped 1x1 convolution."""
    grouped = vectors.unflatten(2, (weight.shape[0], -1))  # (B, N, groups, C/groups)
    mixed = torch.einsum("bngc,gcd->bngd", grouped, weight).flatten(2)
    return mixed if bias is None else mixed + bias


if HAS_TRITON:

    @triton.jit
    def _group_tile(row, rows, group, GROUPS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr):
        """Offsets of the channels of a group in some rows (R, LANES), and the mask."""
        lane = tl.arange(0, LANES)[None, :]
        return (row.to(tl.int64)[:, None] * GROUPS + group) * WIDTH + lane, (row[:, None] < rows) & (lane < WIDTH)

    @jit
    def _grouped_kernel(
        x_ptr, weight_ptr, bias_ptr, y_ptr, rows,
        GROUPS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, I: tl.constexpr, O: tl.constexpr,  # noqa: E741
        R: tl.constexpr, TRANSPOSED: tl.constexpr, BIAS: tl.constexpr,
    ):  # fmt: skip
        """y = x weight + bias of one group; weight (GROUPS, IN, OUT), or (GROUPS, OUT, IN) where TRANSPOSED."""
        group = tl.program_id(0)
        row = tl.program_id(1) * R + tl.arange(0, R)
        i, o = tl.arange(0, I)[:, None], tl.arange(0, O)[None, :]
        inside = o * IN + i if TRANSPOSED else i * OUT + o
        weight = tl.load(weight_ptr + group * IN * OUT + inside, mask=(i < IN) & (o < OUT), other=0.0)
        offset, mask = _group_tile(row, rows, group, GROUPS, IN, I)
        y = tl.dot(tl.load(x_ptr + offset, mask=mask, other=0.0), weight)
        if BIAS:
            y += tl.load(bias_ptr + group * OUT + o, mask=o < OUT, other=0.0).to(tl.float32)
        offset, mask = _group_tile(row, rows, group, GROUPS, OUT, O)
        tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)

    @jit
    def _grouped_weight_kernel(
        x_ptr, g_ptr, partial_ptr, rows,
        GROUPS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, I: tl.constexpr, O: tl.constexpr,  # noqa: E741
        R: tl.constexpr,
    ):  # fmt: skip
        """Partial gradients of the weight, to be summed: partial (programs, GROUPS, IN, OUT)."""
        group, part = tl.program_id(0), tl.program_id(1)
        total = tl.zeros((I, O), tl.float32)
        for first in range(part * R, rows, tl.num_programs(1) * R):
            row = first + tl.arange(0, R)
            offset, mask = _group_tile(row, rows, group, GROUPS, IN, I)
            x = tl.load(x_ptr + offset, mask=mask, other=0.0)
            offset, mask = _group_tile(row, rows, group, GROUPS, OUT, O)
            g = tl.load(g_ptr + offset, mask=mask, other=0.0)
            total = tl.dot(tl.trans(x), g, total)
        i, o = tl.arange(0, I)[:, None], tl.arange(0, O)[None, :]
        offset = (part.to(tl.int64) * GROUPS + group) * IN * OUT + i * OUT + o
        tl.store(partial_ptr + offset, total, mask=(i < IN) & (o < OUT))


@variant
def _grouped(groups: int, inputs: int, outputs: int, transposed: bool, bias: bool) -> Kernel:
    lanes = dict(I=max(16, next_power_of_2(inputs)), O=max(16, next_power_of_2(outputs)))
    return Kernel(
        _grouped_kernel, GROUPS=groups, IN=inputs, OUT=outputs, **lanes, R=64 if sum(lanes.values()) > 128 else 128,
        TRANSPOSED=transposed, BIAS=bias, num_warps=4,
    )  # fmt: skip


@variant
def _grouped_weight(groups: int, inputs: int, outputs: int) -> Kernel:
    lanes = dict(I=max(16, next_power_of_2(inputs)), O=max(16, next_power_of_2(outputs)))
    return Kernel(
        _grouped_weight_kernel, GROUPS=groups, IN=inputs, OUT=outputs, **lanes, R=64,
        num_warps=8 if sum(lanes.values()) > 128 else 4, num_stages=3,
    )  # fmt: skip


def _grouped_forward(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows, weight = rows.contiguous(), weight.contiguous()
    groups, inputs, outputs = weight.shape
    y = torch.empty(rows.shape[0], groups * outputs, dtype=rows.dtype, device=rows.device)
    kernel = _grouped(groups, inputs, outputs, False, bias is not None)
    grid = (groups, cdiv(rows.shape[0], kernel.constants["R"]))
    kernel(grid, rows, weight, weight if bias is None else bias, y, rows.shape[0])
    return y


def _grouped_gradients(g: Tensor, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    g, rows, weight = g.contiguous(), rows.contiguous(), weight.contiguous()
    groups, inputs, outputs = weight.shape
    g_rows, count = torch.empty_like(rows), rows.shape[0]
    kernel = _grouped(groups, outputs, inputs, True, False)
    kernel((groups, cdiv(count, kernel.constants["R"])), g, weight, weight, g_rows, count)
    kernel = _grouped_weight(groups, inputs, outputs)
    programs = min(cdiv(count, kernel.constants["R"]), max(1, PROGRAMS // groups))
    partial = torch.empty(programs, *weight.shape, dtype=torch.float32, device=rows.device)
    kernel((groups, programs), rows, g, partial, count)
    return g_rows, column_sum(partial.flatten(1)).view(weight.shape).to(weight.dtype)


def _grouped_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    rows, weight, bias = inputs
    ctx.save_for_backward(rows, weight)
    ctx.has_bias = bias is not None


def _grouped_backward(ctx: Any, gradients: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    return *gradients(g, *ctx.saved_tensors), g.sum(0) if ctx.has_bias else None


_grouped_linear = FusedOp("grouped_linear", _grouped_forward, _grouped_gradients, _grouped_setup, _grouped_backward)


def _supports_grouped_linear(vectors: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    if not dispatch.on_gpu(vectors) or not dispatch.computes_in_half(vectors) or not vectors.is_contiguous():
        return False
    _, inputs, outputs = weight.shape
    return 16 <= inputs <= MAX_GROUP_DIM and 16 <= outputs <= MAX_GROUP_DIM


@register_op("grouped_linear", reference=grouped_linear_reference, supports=_supports_grouped_linear)
def grouped_linear(vectors: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    dtype = dispatch.compute_dtype(vectors)
    rows, weight = dispatch.cast(vectors.flatten(0, -2), dtype), dispatch.cast(cast_weight(weight), dtype)
    bias = None if bias is None else dispatch.cast(bias, dtype)
    return _grouped_linear(rows, weight, bias).view(*vectors.shape[:-1], weight.shape[0] * weight.shape[2])


@grouped_linear.add("block_diagonal", lambda x, *_: dispatch.on_gpu(x) and dispatch.computes_in_half(x))
def _linear_block_diagonal(vectors: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    dtype = dispatch.compute_dtype(vectors)

    def build() -> Tensor:  # (D, C)
        return torch.block_diag(*dispatch.cast(cast_weight(weight), dtype).transpose(1, 2))

    matrix = cached_layout(weight, ("block_diagonal", dtype), build)
    return F.linear(vectors, matrix, None if bias is None else dispatch.cast(bias, dtype))
