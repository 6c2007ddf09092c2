"""Grouping features into super tokens and spreading them back, straight from channels-last features.

The references, with the paper's equations, are `group` and `spread` in saccade/tokens/super_tokens.py. They copy the
features cell by cell and back; the kernels here read a cell's pixels where they are. A program owns one cell: the
products of its P pixels with its nine neighbouring tokens stay on the chip. What a cell contributes to its nine
neighbours is written once, and summed up by a second kernel.

With the association a constant, grouping and spreading are each other's gradients, so backward needs no other kernels.
"""

from collections.abc import Callable
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.ops import _dispatch as dispatch
from saccade.ops._dispatch import FusedOp, Op, register_op
from saccade.ops._launch import HAS_TRITON, Kernel, cdiv, jit, next_power_of_2, variant

if HAS_TRITON:
    import triton
    import triton.language as tl

MAX_CELL = 16
MAX_CHANNELS = 256
EPS = 1e-12  # added to the weights of a mean, as in the reference

if HAS_TRITON:

    @triton.jit
    def _cell_tile(height, width, rows, columns, CELL: tl.constexpr, P: tl.constexpr):
        """Image, row and column of this program's cell; offsets of its pixels (P), and the mask of those inside."""
        program = tl.program_id(0)
        image, index = program // (rows * columns), program % (rows * columns)
        row, column = index // columns, index % columns
        pixel = tl.arange(0, P)
        y, x = row * CELL + pixel // CELL, column * CELL + pixel % CELL
        mask = (pixel < CELL * CELL) & (y < height) & (x < width)
        return image, row, column, (image.to(tl.int64) * height + y) * width + x, mask

    @triton.jit
    def _load_pixels(x_ptr, pixel, mask, DIM: tl.constexpr, C: tl.constexpr):
        """Pixels of a cell (P, C), zeros outside the map."""
        channel = tl.arange(0, C)
        mask = mask[:, None] & (channel < DIM)[None, :]
        return tl.load(x_ptr + pixel[:, None] * DIM + channel[None, :], mask=mask, other=0.0)

    @triton.jit
    def _load_neighbours(tokens_ptr, image, row, column, rows, columns, DIM: tl.constexpr, C: tl.constexpr):
        """Tokens of the 3x3 cells around (16, C), zeros outside the map and after the ninth."""
        i, channel = tl.arange(0, 16), tl.arange(0, C)
        y, x = row + i // 3 - 1, column + i % 3 - 1
        mask = (i < 9) & (y >= 0) & (y < rows) & (x >= 0) & (x < columns)
        offset = ((image.to(tl.int64) * rows + y) * columns + x)[:, None] * DIM + channel[None, :]
        return tl.load(tokens_ptr + offset, mask=mask[:, None] & (channel < DIM)[None, :], other=0.0)

    @triton.jit
    def _association_tile(CELL: tl.constexpr, P: tl.constexpr):
        """Offsets and mask (16, P) of this cell's part of the association."""
        i, p = tl.arange(0, 16), tl.arange(0, P)
        offset = (tl.program_id(0).to(tl.int64) * 9 + i)[:, None] * (CELL * CELL) + p[None, :]
        return offset, (i < 9)[:, None] & (p < CELL * CELL)[None, :]

    @triton.jit
    def _store_parts(parts_ptr, association, x, DIM: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
        """What this cell contributes to its nine neighbours, (9, C)."""
        parts = tl.dot(association, x, input_precision=PRECISION)  # (16, C)
        i, channel = tl.arange(0, 16), tl.arange(0, C)
        target = parts_ptr + (tl.program_id(0).to(tl.int64) * 9 + i)[:, None] * DIM + channel[None, :]
        tl.store(target, parts, mask=(i < 9)[:, None] & (channel < DIM)[None, :])

    @triton.jit
    def _sender(i: tl.constexpr, rows, columns):
        """Index of the part that the cell which has this one as its neighbour i wrote, and whether that cell exists."""
        program = tl.program_id(0)
        image, index = program // (rows * columns), program % (rows * columns)
        y, x = index // columns + 1 - i // 3, index % columns + 1 - i % 3
        valid = (y >= 0) & (y < rows) & (x >= 0) & (x < columns)
        return ((image.to(tl.int64) * rows + y) * columns + x) * 9 + i, valid

    @jit
    @no_type_check
    def _cell_mean_kernel(
        x_ptr, means_ptr, height, width, rows, columns,
        DIM: tl.constexpr, CELL: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    ):  # fmt: skip
        _, _, _, pixel, mask = _cell_tile(height, width, rows, columns, CELL, P)
        mean = tl.sum(_load_pixels(x_ptr, pixel, mask, DIM, C).to(tl.float32), 0) / (CELL * CELL)
        channel = tl.arange(0, C)
        target = means_ptr + tl.program_id(0).to(tl.int64) * DIM + channel
        tl.store(target, mean.to(means_ptr.dtype.element_ty), mask=channel < DIM)

    @jit
    @no_type_check
    def _associate_kernel(
        x_ptr, means_ptr, association_ptr, parts_ptr, weights_ptr, height, width, rows, columns,
        DIM: tl.constexpr, CELL: tl.constexpr, SCALE: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
        PRECISION: tl.constexpr,
    ):  # fmt: skip
        """Association of a cell's pixels with nine tokens, and what the cell contributes: sums (9, C), weights (9)."""
        image, row, column, pixel, mask = _cell_tile(height, width, rows, columns, CELL, P)
        x, i = _load_pixels(x_ptr, pixel, mask, DIM, C), tl.arange(0, 16)
        near = _load_neighbours(means_ptr, image, row, column, rows, columns, DIM, C)
        scores = tl.dot(near, tl.trans(x), input_precision=PRECISION) * SCALE  # (16, P)
        scores = tl.where((i < 9)[:, None], scores, float("-inf"))
        scores = tl.exp(scores - tl.max(scores, 0)[None, :])
        offset, valid = _association_tile(CELL, P)
        association = (scores / tl.sum(scores, 0)[None, :]).to(x.dtype)
        association = tl.where(valid, association, 0.0).to(x.dtype)
        tl.store(association_ptr + offset, association, mask=valid)
        weights = tl.sum(association.to(tl.float32), 1)
        tl.store(weights_ptr + tl.program_id(0).to(tl.int64) * 9 + i, weights, mask=i < 9)
        _store_parts(parts_ptr, association, x, DIM, C, PRECISION)

    @jit
    def _parts_kernel(
        x_ptr, association_ptr, parts_ptr, height, width, rows, columns,
        DIM: tl.constexpr, CELL: tl.constexpr, P: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """What a cell contributes to its nine neighbours by a given association."""
        _, _, _, pixel, mask = _cell_tile(height, width, rows, columns, CELL, P)
        offset, valid = _association_tile(CELL, P)
        association = tl.load(association_ptr + offset, mask=valid, other=0.0)
        _store_parts(parts_ptr, association, _load_pixels(x_ptr, pixel, mask, DIM, C), DIM, C, PRECISION)

    @jit
    @no_type_check
    def _mean_kernel(
        parts_ptr, weights_ptr, tokens_ptr, weight_ptr, rows, columns,
        DIM: tl.constexpr, EPSILON: tl.constexpr, C: tl.constexpr,
    ):  # fmt: skip
        """Weighted mean of what nine cells contributed to this token, and the sum of the weights."""
        channel = tl.arange(0, C)
        total, weight = tl.zeros((C,), tl.float32), EPSILON
        for i in tl.static_range(9):
            sender, valid = _sender(i, rows, columns)
            mask = (channel < DIM) & (valid + tl.zeros_like(channel) > 0)  # the interpreter broadcasts no scalar mask
            total += tl.load(parts_ptr + sender * DIM + channel, mask=mask, other=0.0)
            weight += tl.load(weights_ptr + sender, mask=valid, other=0.0)
        tl.store(weight_ptr + tl.program_id(0), weight)
        target = tokens_ptr + tl.program_id(0).to(tl.int64) * DIM + channel
        tl.store(target, (total / weight).to(tokens_ptr.dtype.element_ty), mask=channel < DIM)

    @jit
    @no_type_check
    def _sum_kernel(parts_ptr, total_ptr, rows, columns, DIM: tl.constexpr, C: tl.constexpr):
        """Sum of what nine cells contributed to this token."""
        channel = tl.arange(0, C)
        total = tl.zeros((C,), tl.float32)
        for i in tl.static_range(9):
            sender, valid = _sender(i, rows, columns)
            mask = (channel < DIM) & (valid + tl.zeros_like(channel) > 0)  # the interpreter broadcasts no scalar mask
            total += tl.load(parts_ptr + sender * DIM + channel, mask=mask, other=0.0)
        target = total_ptr + tl.program_id(0).to(tl.int64) * DIM + channel
        tl.store(target, total.to(total_ptr.dtype.element_ty), mask=channel < DIM)

    @jit
    def _spread_kernel(
        tokens_ptr, association_ptr, y_ptr, height, width, rows, columns,
        DIM: tl.constexpr, CELL: tl.constexpr, P: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        image, row, column, pixel, mask = _cell_tile(height, width, rows, columns, CELL, P)
        near = _load_neighbours(tokens_ptr, image, row, column, rows, columns, DIM, C)
        offset, valid = _association_tile(CELL, P)
        association = tl.load(association_ptr + offset, mask=valid, other=0.0)
        y = tl.dot(tl.trans(association), near, input_precision=PRECISION)  # (P, C)
        channel = tl.arange(0, C)
        target = y_ptr + pixel[:, None] * DIM + channel[None, :]
        tl.store(target, y.to(y_ptr.dtype.element_ty), mask=mask[:, None] & (channel < DIM)[None, :])


@variant
def _kernel(name: str, dim: int, cell: int, dtype: torch.dtype) -> Kernel:
    constants: dict[str, Any] = dict(DIM=dim, C=max(16, next_power_of_2(dim)))
    if name == "mean":
        return Kernel(_mean_kernel, EPSILON=EPS, **constants)
    if name == "sum":
        return Kernel(_sum_kernel, **constants)
    constants |= dict(CELL=cell, P=max(16, next_power_of_2(cell * cell)))
    if name == "cell_mean":
        return Kernel(_cell_mean_kernel, **constants)
    constants["PRECISION"] = "ieee" if dtype == torch.float32 else "tf32"
    if name == "associate":
        return Kernel(_associate_kernel, SCALE=dim**-0.5, **constants)
    return Kernel(_parts_kernel if name == "parts" else _spread_kernel, **constants)


def _group(x: Tensor, cell: int) -> tuple[Tensor, Tensor, Tensor]:
    """x (B, H, W, C) -> tokens (B, rows, columns, C), association (B, rows, columns, 9, P), weights plus EPS."""
    x = x.contiguous()
    batch, height, width, dim = x.shape
    grid = rows, columns = cdiv(height, cell), cdiv(width, cell)
    programs, key = (batch * rows * columns,), (dim, cell, x.dtype)
    means = torch.empty(batch, *grid, dim, dtype=x.dtype, device=x.device)
    _kernel("cell_mean", *key)(programs, x, means, height, width, *grid)
    association = torch.empty(batch, *grid, 9, cell * cell, dtype=x.dtype, device=x.device)
    parts = torch.empty(batch, *grid, 9, dim, dtype=torch.float32, device=x.device)
    weights = torch.empty(batch, *grid, 9, dtype=torch.float32, device=x.device)
    _kernel("associate", *key)(programs, x, means, association, parts, weights, height, width, *grid)
    tokens = torch.empty_like(means)
    weight = torch.empty(batch, *grid, dtype=torch.float32, device=x.device)
    _kernel("mean", *key)(programs, parts, weights, tokens, weight, *grid)
    return tokens, association, weight


def _collect(x: Tensor, association: Tensor, cell: int) -> Tensor:
    """x (B, H, W, C), association -> sums (B, rows, columns, C): the transpose of `_spread`."""
    x, association = x.contiguous(), association.contiguous()
    batch, height, width, dim = x.shape
    grid = rows, columns = cdiv(height, cell), cdiv(width, cell)
    programs, key = (batch * rows * columns,), (dim, cell, x.dtype)
    parts = torch.empty(batch, *grid, 9, dim, dtype=torch.float32, device=x.device)
    _kernel("parts", *key)(programs, x, association, parts, height, width, *grid)
    total = torch.empty(batch, *grid, dim, dtype=x.dtype, device=x.device)
    _kernel("sum", *key)(programs, parts, total, *grid)
    return total


def _spread(tokens: Tensor, association: Tensor, cell: int, height: int, width: int) -> Tensor:
    """tokens (B, rows, columns, C), association (B, rows, columns, 9, P) -> (B, H, W, C)."""
    tokens, association = tokens.contiguous(), association.contiguous()
    batch, rows, columns, dim = tokens.shape
    y = torch.empty(batch, height, width, dim, dtype=tokens.dtype, device=tokens.device)
    kernel = _kernel("spread", dim, cell, tokens.dtype)
    kernel((batch * rows * columns,), tokens, association, y, height, width, rows, columns)
    return y


def _group_gradients(g: Tensor, association: Tensor, weight: Tensor, cell: int, height: int, width: int) -> Tensor:
    return _spread((g / weight.unsqueeze(3)).to(association.dtype), association, cell, height, width)


def _group_setup(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, ctx.cell = inputs
    ctx.size = x.shape[1], x.shape[2]
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _group_backward(ctx: Any, gradients: Any, g: Tensor, *_: Any) -> tuple[Tensor, None]:
    return gradients(g, *ctx.saved_tensors, ctx.cell, *ctx.size), None


def _spread_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, association, ctx.cell, _, _ = inputs
    ctx.save_for_backward(association)


def _spread_backward(ctx: Any, gradients: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    return gradients(g, *ctx.saved_tensors, ctx.cell), None, None, None, None


_group_op = FusedOp("super_token_group", _group, _group_gradients, _group_setup, _group_backward)
_spread_op = FusedOp("super_token_spread", _spread, _collect, _spread_setup, _spread_backward)


def _supports_group(
    features: Tensor, cell: int, iterations: int = 1, mask_border: bool = False, detach: bool = True
) -> bool:
    if iterations != 1 or mask_border or not detach or not dispatch.on_gpu(features):
        return False
    return cell <= MAX_CELL and features.shape[1] <= MAX_CHANNELS and dispatch.is_channels_last(features)


def _supports_spread(tokens: Tensor, association: Tensor, cell: int, height: int, width: int) -> bool:
    """Where there is an association, of the tokens' dtype, that is a constant to autograd."""
    if not dispatch.on_gpu(tokens, association) or tokens.dtype != association.dtype or cell > MAX_CELL:
        return False
    return tokens.shape[3] <= MAX_CHANNELS and association.ndim == 5 and not dispatch.needs_grad(association)


def pad_pixels(pixels: Tensor, height: int, width: int) -> Tensor:
    """pixels (B, H, W, C) -> (B, height, width, C), padded with zeros at the bottom and right.

    An exported graph always pads, by zero pixels where none are missing: a branch would fix the sizes it is valid for.
    """
    bottom, right = height - pixels.shape[1], width - pixels.shape[2]
    if not dispatch.is_exporting() and bottom == 0 and right == 0:
        return pixels
    return F.pad(pixels, (0, 0, 0, right, 0, bottom))


def crop_pixels(pixels: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `pad_pixels`: (B, …, …, C) -> (B, height, width, C).

    An exported graph pads by negative numbers: torch.export guards on the strides of a slice, which are those of a
    contiguous tensor only at sizes that need no padding.
    """
    if dispatch.is_exporting():
        return F.pad(pixels, (0, 0, 0, width - pixels.shape[2], 0, height - pixels.shape[1]))
    return pixels[:, :height, :width]


def fused_group(reference: Callable[..., tuple[Tensor, Tensor]]) -> Op[..., tuple[Tensor, Tensor]]:
    """Decorator that adds the kernels to the function that groups features into super tokens."""

    @register_op("super_token_group", reference=reference, supports=_supports_group)
    def group(
        features: Tensor, cell: int, iterations: int = 1, mask_border: bool = False, detach: bool = True
    ) -> tuple[Tensor, Tensor]:
        return _group_op(features.permute(0, 2, 3, 1), cell)[:2]

    return group


def fused_spread(reference: Callable[..., Tensor]) -> Op[..., Tensor]:
    """Decorator that adds the kernel to the function that spreads super tokens over the pixels."""

    @register_op("super_token_spread", reference=reference, supports=_supports_spread)
    def spread(tokens: Tensor, association: Tensor, cell: int, height: int, width: int) -> Tensor:
        return _spread_op(tokens, association, cell, height, width).permute(0, 3, 1, 2)

    return spread
