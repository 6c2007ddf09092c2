"""Super tokens straight from a channels-last map: cell means, association, grouping and the way back.

The twins (saccade.tokens.super_tokens) first copy the map cell by cell and back again; these kernels read a cell's
pixels where they are. A program owns one cell: its P pixels against its nine neighbours are two small matrix products
that never leave the chip. What a cell sends to its nine neighbours is written once and collected by them.

Forward: the map is read twice (means; association and grouping) and written once (the way back). Backward, with the
association a constant: grouping and putting back are each other's gradients, so no further kernel is needed.

To a compiler the three steps are opaque operators: it sees shapes and strides, launches nothing itself, and every step
makes sure of its own memory order. (In operators that a compiler looks into, one tensor stood in two places of a
kernel, which it may treat as two copies; docs/dev/performance.md.)
"""

from functools import partial

import torch
from torch import Tensor

from saccade.kernels import HAS_TRITON, learns
from saccade.kernels.launch import Launch, planned
from saccade.kernels.sizes import parts, power_of_2

if HAS_TRITON:
    import triton
    import triton.language as tl
    from torch.library import custom_op

    @triton.jit
    def _place(rows, columns, cell, height, width, P: tl.constexpr):
        """Image, row and column of this program's cell; offsets of its pixels in a map, and which are inside it."""
        program = tl.program_id(0)
        image, index = program // (rows * columns), program % (rows * columns)
        row, column = index // columns, index % columns
        pixel = tl.arange(0, P)
        y, x = row * cell + pixel // cell, column * cell + pixel % cell
        inside = (pixel < cell * cell) & (y < height) & (x < width)
        return image, row, column, (image.to(tl.int64) * height + y) * width + x, inside

    @triton.jit
    def _near(pointer, image, row, column, rows, columns, channels, channel, NINE: tl.constexpr):
        """The tokens of the 3x3 cells around, (NINE, channels), zeros outside the map and beyond the ninth."""
        i = tl.arange(0, NINE)
        y, x = row + i // 3 - 1, column + i % 3 - 1
        inside = (i < 9) & (y >= 0) & (y < rows) & (x >= 0) & (x < columns)
        offset = ((image.to(tl.int64) * rows + y) * columns + x)[:, None] * channels + channel[None, :]
        return tl.load(pointer + offset, mask=inside[:, None] & (channel < channels)[None, :], other=0.0)

    @triton.jit
    def _mean_kernel(
        x_pointer, m_pointer, height, width, channels, rows, columns, cell, P: tl.constexpr, C: tl.constexpr
    ):
        _, _, _, pixel, inside = _place(rows, columns, cell, height, width, P)
        channel = tl.arange(0, C)
        mask = inside[:, None] & (channel < channels)[None, :]
        x = tl.load(x_pointer + pixel[:, None] * channels + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(x, 0) / (cell * cell)
        target = m_pointer + tl.program_id(0).to(tl.int64) * channels + channel
        tl.store(target, mean.to(m_pointer.dtype.element_ty), mask=channel < channels)

    @triton.jit
    def _group_kernel(
        x_pointer, m_pointer, a_pointer, s_pointer, w_pointer, height, width, channels, rows, columns, cell, scale,
        KNOWN: tl.constexpr, P: tl.constexpr, C: tl.constexpr, NINE: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """Association (unless KNOWN), and what the cell sends to its neighbours: sums (9, C) and weights (9)."""
        image, row, column, pixel, inside = _place(rows, columns, cell, height, width, P)
        channel, i, p = tl.arange(0, C), tl.arange(0, NINE), tl.arange(0, P)
        mask = inside[:, None] & (channel < channels)[None, :]
        x = tl.load(x_pointer + pixel[:, None] * channels + channel[None, :], mask=mask, other=0.0)
        start = tl.program_id(0).to(tl.int64) * 9
        shares = a_pointer + (start + i)[:, None] * (cell * cell) + p[None, :]
        held = (i < 9)[:, None] & (p < cell * cell)[None, :]
        if KNOWN:
            association = tl.load(shares, mask=held, other=0.0)
        else:
            near = _near(m_pointer, image, row, column, rows, columns, channels, channel, NINE)
            scores = tl.dot(near, tl.trans(x), input_precision=PRECISION) * scale  # (NINE, P)
            scores = tl.where((i < 9)[:, None], scores, float("-inf"))
            scores = tl.exp(scores - tl.max(scores, 0)[None, :])
            association = (scores / tl.sum(scores, 0)[None, :]).to(x.dtype)
            association = tl.where(held, association, 0.0).to(x.dtype)
            tl.store(shares, association, mask=held)
            tl.store(w_pointer + start + i, tl.sum(association.to(tl.float32), 1), mask=i < 9)
        sent = tl.dot(association, x, input_precision=PRECISION)  # (NINE, C)
        target = s_pointer + (start + i)[:, None] * channels + channel[None, :]
        tl.store(target, sent, mask=(i < 9)[:, None] & (channel < channels)[None, :])

    @triton.jit
    def _collect_kernel(
        s_pointer, w_pointer, t_pointer, v_pointer, channels, rows, columns, eps, MEAN: tl.constexpr, C: tl.constexpr
    ):
        """What nine neighbours sent to this cell, summed, and with MEAN divided by their weights (kept in v)."""
        program = tl.program_id(0)
        image, index = program // (rows * columns), program % (rows * columns)
        row, column = index // columns, index % columns
        channel = tl.arange(0, C)
        total = tl.zeros((C,), tl.float32)
        weight = 0.0
        for i in tl.static_range(9):
            y, x = row + 1 - i // 3, column + 1 - i % 3  # the cell that has this one as its neighbour i
            inside = (y >= 0) & (y < rows) & (x >= 0) & (x < columns)
            sender = ((image.to(tl.int64) * rows + y) * columns + x) * 9 + i
            mask = (channel < channels) & (inside + tl.zeros_like(channel) > 0)
            total += tl.load(s_pointer + sender * channels + channel, mask=mask, other=0.0)
            if MEAN:
                weight += tl.load(w_pointer + sender, mask=inside, other=0.0)
        if MEAN:
            weight += eps
            total = total / weight
            tl.store(v_pointer + program, weight)
        target = t_pointer + program.to(tl.int64) * channels + channel
        tl.store(target, total.to(t_pointer.dtype.element_ty), mask=channel < channels)

    @triton.jit
    def _spread_kernel(
        t_pointer, a_pointer, y_pointer, height, width, channels, rows, columns, cell,
        P: tl.constexpr, C: tl.constexpr, NINE: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        image, row, column, pixel, inside = _place(rows, columns, cell, height, width, P)
        channel, i, p = tl.arange(0, C), tl.arange(0, NINE), tl.arange(0, P)
        near = _near(t_pointer, image, row, column, rows, columns, channels, channel, NINE)
        shares = a_pointer + (tl.program_id(0).to(tl.int64) * 9 + i)[:, None] * (cell * cell) + p[None, :]
        held = (i < 9)[:, None] & (p < cell * cell)[None, :]
        association = tl.load(shares, mask=held, other=0.0)
        y = tl.dot(tl.trans(association), near, input_precision=PRECISION)  # (P, C)
        mask = inside[:, None] & (channel < channels)[None, :]
        target = y_pointer + pixel[:, None] * channels + channel[None, :]
        tl.store(target, y.to(y_pointer.dtype.element_ty), mask=mask)

    def _sizes(x: Tensor, cell: int) -> tuple[int, int, int, int, int, int]:
        batch, height, width, channels = x.shape
        return batch, height, width, channels, parts(height, cell), parts(width, cell)

    def _blocks(cell: int, channels: int, exact: bool) -> dict:
        pixels, wide = max(16, power_of_2(cell * cell)), max(16, power_of_2(channels))
        return dict(P=pixels, C=wide, NINE=16, PRECISION="ieee" if exact else "tf32")

    @planned
    def _averaging(batch, height, width, channels, rows, columns, cell: int) -> Launch:
        """The cells' means."""
        grid, blocks = (batch * rows * columns,), _blocks(cell, channels, True)
        numbers = height, width, channels, rows, columns, cell
        return Launch(_mean_kernel, grid, *numbers, P=blocks["P"], C=blocks["C"])

    @planned
    def _sending(batch, height, width, channels, rows, columns, cell: int, exact: bool, known: bool) -> Launch:
        """What every cell sends to its neighbours; scores of an association that is not known are made small."""
        numbers = height, width, channels, rows, columns, cell, 1.0 if known else channels**-0.5
        blocks = _blocks(cell, channels, exact)
        return Launch(_group_kernel, (batch * rows * columns,), *numbers, KNOWN=known, **blocks)

    @planned
    def _collecting(batch: int, channels: int, rows: int, columns: int, eps: float, mean: bool) -> Launch:
        wide = max(16, power_of_2(channels))
        return Launch(_collect_kernel, (batch * rows * columns,), channels, rows, columns, eps, MEAN=mean, C=wide)

    @planned
    def _spreading(batch, height, width, channels, rows, columns, cell: int, exact: bool) -> Launch:
        numbers = height, width, channels, rows, columns, cell
        return Launch(_spread_kernel, (batch * rows * columns,), *numbers, **_blocks(cell, channels, exact))

    def _group(x: Tensor, cell: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, H, W, C) -> tokens (B, rows, columns, C), association (B, rows, columns, 9, P), weights plus eps."""
        x = x.contiguous()
        sizes = batch, _, _, channels, rows, columns = _sizes(x, cell)
        means = torch.empty(batch, rows, columns, channels, dtype=x.dtype, device=x.device)
        _averaging(*sizes, cell)(x, means)
        association = torch.empty(batch, rows, columns, 9, cell * cell, dtype=x.dtype, device=x.device)
        sent = torch.empty(batch, rows, columns, 9, channels, dtype=torch.float32, device=x.device)
        weights = torch.empty(batch, rows, columns, 9, dtype=torch.float32, device=x.device)
        _sending(*sizes, cell, x.dtype == torch.float32, False)(x, means, association, sent, weights)
        tokens = torch.empty_like(means)
        weight = torch.empty(batch, rows, columns, dtype=torch.float32, device=x.device)
        _collecting(batch, channels, rows, columns, eps, True)(sent, weights, tokens, weight)
        return tokens, association, weight

    def _collect(x: Tensor, association: Tensor, cell: int) -> Tensor:
        """x (B, H, W, C), association -> sums (B, rows, columns, C) of what every pixel gives to every token."""
        x, association = x.contiguous(), association.contiguous()
        sizes = batch, _, _, channels, rows, columns = _sizes(x, cell)
        sent = torch.empty(batch, rows, columns, 9, channels, dtype=torch.float32, device=x.device)
        _sending(*sizes, cell, x.dtype == torch.float32, True)(x, x, association, sent, sent)
        total = torch.empty(batch, rows, columns, channels, dtype=x.dtype, device=x.device)
        _collecting(batch, channels, rows, columns, 0.0, False)(sent, sent, total, sent)
        return total

    def _spread(tokens: Tensor, association: Tensor, cell: int, height: int, width: int) -> Tensor:
        """tokens (B, rows, columns, C), association -> map (B, H, W, C)."""
        tokens, association = tokens.contiguous(), association.contiguous()
        batch, rows, columns, channels = tokens.shape
        y = torch.empty(batch, height, width, channels, dtype=tokens.dtype, device=tokens.device)
        exact = tokens.dtype == torch.float32
        _spreading(batch, height, width, channels, rows, columns, cell, exact)(tokens, association, y)
        return y

    def _save_group(ctx, inputs, output) -> None:
        x, ctx.cell, _ = inputs
        _, association, weight = output
        ctx.size = x.shape[1], x.shape[2]
        ctx.save_for_backward(association, weight)
        ctx.mark_non_differentiable(association, weight)

    def _group_backward(ctx, g_tokens: Tensor, *_, back):
        association, weight = ctx.saved_tensors
        scaled = (g_tokens / weight.unsqueeze(3)).to(association.dtype).contiguous()
        return back(scaled, association, ctx.cell, *ctx.size), None, None

    def _save_spread(ctx, inputs, output) -> None:
        _, association, ctx.cell, _, _ = inputs
        ctx.save_for_backward(association)

    def _spread_backward(ctx, g: Tensor, back):
        (association,) = ctx.saved_tensors
        return back(g.contiguous(), association, ctx.cell), None, None, None, None

    _group_op = custom_op("saccade::super_tokens_group", _group, mutates_args=())
    _collect_op = custom_op("saccade::super_tokens_collect", _collect, mutates_args=())
    _spread_op = custom_op("saccade::super_tokens_spread", _spread, mutates_args=())

    @_group_op.register_fake
    def _(x: Tensor, cell: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        batch, _, _, channels, rows, columns = _sizes(x, cell)
        association = x.new_empty(batch, rows, columns, 9, cell * cell)
        weight = x.new_empty(batch, rows, columns, dtype=torch.float32)
        return x.new_empty(batch, rows, columns, channels), association, weight

    @_collect_op.register_fake
    def _(x: Tensor, association: Tensor, cell: int) -> Tensor:
        batch, _, _, channels, rows, columns = _sizes(x, cell)
        return x.new_empty(batch, rows, columns, channels)

    @_spread_op.register_fake
    def _(tokens: Tensor, association: Tensor, cell: int, height: int, width: int) -> Tensor:
        return tokens.new_empty(tokens.shape[0], height, width, tokens.shape[3])

    _group_op.register_autograd(partial(_group_backward, back=_spread_op), setup_context=_save_group)
    _spread_op.register_autograd(partial(_spread_backward, back=_collect_op), setup_context=_save_spread)

    class _Group(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, cell: int, eps: float) -> tuple[Tensor, Tensor]:
            output = tokens, association, _ = _group(x, cell, eps)
            _save_group(ctx, (x, cell, eps), output)
            ctx.set_materialize_grads(False)  # of the association there is none: no memory of zeros for it
            return tokens, association

        @staticmethod
        def backward(ctx, g_tokens: Tensor, *_):
            return _group_backward(ctx, g_tokens, back=_spread)

    class _Spread(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tokens: Tensor, association: Tensor, cell: int, height: int, width: int) -> Tensor:
            _save_spread(ctx, (tokens, association, cell, height, width), None)
            return _spread(tokens, association, cell, height, width)

        @staticmethod
        def backward(ctx, g: Tensor):
            return _spread_backward(ctx, g, back=_collect)


def group(x: Tensor, cell: int, eps: float) -> tuple[Tensor, Tensor]:
    """x (B, H, W, C) -> tokens (B, rows, columns, C), association (B, rows, columns, 9, P)."""
    if torch.compiler.is_compiling():
        return _group_op(x, cell, eps)[:2]
    return _Group.apply(x, cell, eps) if learns(x) else _group(x, cell, eps)[:2]


def spread(tokens: Tensor, association: Tensor, cell: int, height: int, width: int) -> Tensor:
    """tokens (B, rows, columns, C), association (B, rows, columns, 9, P) -> map (B, H, W, C)."""
    fused = _spread_op if torch.compiler.is_compiling() else _Spread.apply if learns(tokens) else _spread
    return fused(tokens, association, cell, height, width)
