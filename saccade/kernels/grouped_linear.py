"""Channels in groups, each with a matrix of its own, of at most 128 channels to 128: a grouped 1x1 convolution on rows.

The library has no product for it that keeps rows as they lie: a batch of products reads and writes strided parts at a
fraction of the memory's speed, and one product with zeros between the groups multiplies mostly by those. A group's
matrix fits on the chip, so here a program takes some rows of one group, and the way back is two more such passes.
"""

import torch
from torch import Tensor

from saccade.kernels import HAS_TRITON, learns
from saccade.kernels.known import describe
from saccade.kernels.launch import Launch, planned
from saccade.kernels.sizes import parts, power_of_2

WIDEST = 128  # channels of a group, in or out
PROGRAMS = 528  # that share the rows of a weight's gradient: four for every multiprocessor of an H200


def are_narrow(rows: Tensor, weight: Tensor) -> bool:
    """Whether the groups are as narrow as the kernel wants them: weight (groups, C/groups, D/groups)."""
    _, inputs, outputs = weight.shape
    return 16 <= inputs <= WIDEST and 16 <= outputs <= WIDEST and rows.is_contiguous()


def grouped_linear_twin(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same by the library."""
    found = torch.einsum("ngc,gcd->ngd", rows.unflatten(1, (weight.shape[0], -1)), weight).flatten(1)
    return found if bias is None else found + bias


if HAS_TRITON:
    import triton
    import triton.language as tl
    from torch.library import custom_op

    @triton.jit
    def _tile_of(pointer, row, rows, groups, group, WIDTH: tl.constexpr, WIDE: tl.constexpr):
        """Where the channels of a group lie in some rows (R, WIDE), and which of them there are."""
        lane = tl.arange(0, WIDE)[None, :]
        at = pointer + (row.to(tl.int64)[:, None] * groups + group) * WIDTH + lane
        return at, (row[:, None] < rows) & (lane < WIDTH)

    @triton.jit
    def _product_kernel(
        x_pointer, w_pointer, b_pointer, y_pointer, rows, groups,
        IN: tl.constexpr, OUT: tl.constexpr, I: tl.constexpr, O: tl.constexpr, ROWS: tl.constexpr,  # noqa: E741
        TURNED: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """y = x w + b of one group; w (groups, IN, OUT), or (groups, OUT, IN) where it is TURNED."""
        group = tl.program_id(0)
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        i, o = tl.arange(0, I)[:, None], tl.arange(0, O)[None, :]
        inside = o * IN + i if TURNED else i * OUT + o
        weight = tl.load(w_pointer + group * IN * OUT + inside, mask=(i < IN) & (o < OUT), other=0.0)
        at, known = _tile_of(x_pointer, row, rows, groups, group, IN, I)
        y = tl.dot(tl.load(at, mask=known, other=0.0), weight, input_precision=PRECISION)
        if BIAS:
            y += tl.load(b_pointer + group * OUT + o, mask=o < OUT, other=0.0).to(tl.float32)
        at, known = _tile_of(y_pointer, row, rows, groups, group, OUT, O)
        tl.store(at, y.to(y_pointer.dtype.element_ty), mask=known)

    @triton.jit
    def _weight_kernel(
        x_pointer, g_pointer, p_pointer, rows, groups,
        IN: tl.constexpr, OUT: tl.constexpr, I: tl.constexpr, O: tl.constexpr, ROWS: tl.constexpr,  # noqa: E741
        PRECISION: tl.constexpr,
    ):  # fmt: skip
        """Partial gradients of the weight, summed outside: p (parts, groups, IN, OUT)."""
        group, part = tl.program_id(0), tl.program_id(1)
        total = tl.zeros((I, O), tl.float32)
        for first in range(part * ROWS, rows, tl.num_programs(1) * ROWS):
            row = first + tl.arange(0, ROWS)
            at, known = _tile_of(x_pointer, row, rows, groups, group, IN, I)
            x = tl.load(at, mask=known, other=0.0)
            at, known = _tile_of(g_pointer, row, rows, groups, group, OUT, O)
            g = tl.load(at, mask=known, other=0.0)
            total = tl.dot(tl.trans(x), g, total, input_precision=PRECISION)
        i, o = tl.arange(0, I)[:, None], tl.arange(0, O)[None, :]
        at = p_pointer + (part.to(tl.int64) * groups + group) * IN * OUT + i * OUT + o
        tl.store(at, total, mask=(i < IN) & (o < OUT))

    def _tile(inputs: int, outputs: int, exact: bool) -> dict[str, int]:
        """Rows at once, channels in and out, threads."""
        wide, to = (max(16, power_of_2(number)) for number in (inputs, outputs))
        rows = 32 if exact else 64 if wide + to > 128 else 128
        return dict(I=wide, O=to, ROWS=rows, num_warps=4)

    @planned
    def _multiplying(
        rows: int, groups: int, inputs: int, outputs: int, turned: bool, bias: bool, exact: bool
    ) -> Launch:
        tile = _tile(inputs, outputs, exact)
        switches = dict(TURNED=turned, BIAS=bias, PRECISION="ieee" if exact else "tf32")
        grid = (groups, parts(rows, tile["ROWS"]))
        return Launch(_product_kernel, grid, rows, groups, IN=inputs, OUT=outputs, **switches, **tile)

    @planned
    def _weighing(rows: int, groups: int, inputs: int, outputs: int, exact: bool) -> tuple[int, Launch]:
        """Programs that share the rows of a group, and their launch."""
        tile = _tile(inputs, outputs, exact) | dict(ROWS=32 if exact else 64, num_stages=3)
        tile["num_warps"] = 8 if tile["I"] + tile["O"] > 128 else 4
        share = max(1, min(parts(rows, tile["ROWS"]), PROGRAMS // groups))
        numbers, precision = dict(IN=inputs, OUT=outputs), "ieee" if exact else "tf32"
        return share, Launch(_weight_kernel, (groups, share), rows, groups, **numbers, PRECISION=precision, **tile)

    def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows, weight = rows.contiguous(), weight.contiguous()
        groups, inputs, outputs = weight.shape
        found = torch.empty(rows.shape[0], groups * outputs, dtype=rows.dtype, device=rows.device)
        exact = rows.dtype == torch.float32
        start = _multiplying(rows.shape[0], groups, inputs, outputs, False, bias is not None, exact)
        start(rows, weight, rows if bias is None else bias, found)
        return found

    def _gradients(g: Tensor, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        g, rows, weight = g.contiguous(), rows.contiguous(), weight.contiguous()
        groups, inputs, outputs = weight.shape
        exact = rows.dtype == torch.float32
        to_rows = torch.empty_like(rows)
        _multiplying(rows.shape[0], groups, outputs, inputs, True, False, exact)(g, weight, g, to_rows)
        share, weigh = _weighing(rows.shape[0], groups, inputs, outputs, exact)
        partial = torch.empty(share, *weight.shape, dtype=torch.float32, device=rows.device)
        weigh(rows, g, partial)
        return to_rows, partial.sum(0).to(weight.dtype)

    class _Grouped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(rows, weight)
            return _multiply(rows, weight, None)

        @staticmethod
        def backward(ctx, g: Tensor):
            return _gradients(g, *ctx.saved_tensors)

    _op = custom_op("saccade::grouped_linear", _multiply, mutates_args=())
    _gradients_op = custom_op("saccade::grouped_linear_backward", _gradients, mutates_args=())

    describe(_op, lambda rows, weight, *_: rows.new_empty(rows.shape[0], weight.shape[0] * weight.shape[2]))
    describe(_gradients_op, lambda g, *inputs: tuple(x.new_empty(x.shape) for x in inputs))

    def _save(ctx, inputs, output) -> None:
        rows, weight, bias = inputs
        ctx.save_for_backward(rows, weight)
        ctx.has_bias = bias is not None

    def _backward(ctx, g: Tensor):
        to_bias = g.sum(0) if ctx.has_bias else None
        return *_gradients_op(g, *ctx.saved_tensors), to_bias

    _op.register_autograd(_backward, setup_context=_save)


def grouped_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows (N, C), weight (groups, C/groups, D/groups), bias (D) -> (N, D)."""
    if torch.compiler.is_compiling():
        return _op(rows, weight, bias)
    if learns(rows, weight, bias):
        found = _Grouped.apply(rows, weight)
        return found if bias is None else found + bias
    return _multiply(rows, weight, bias)
