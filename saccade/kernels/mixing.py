"""SparseFormer's sampling and mixing where they learn: one kernel there, three on the way back.

Of a token that reads x (P, C) from the map and makes the matrices M (C, C) and S (P, P), one row of memory:

    h = x M + b,  k = S gelu(h) + c,  y = gelu(k)

The library keeps x, h, k and both activations for the way back, whose six small products it runs as six batches and
whose gradients of M and S it copies into that of their row. Here nothing but the inputs is kept. The way back reads the
map again, computes all of a token again in one program, whose matrices stay on the chip, and writes the gradient of
the row where it belongs. What was read gets its own gradient, which the kernel of `sample` carries on to the map and
the points.
"""

import torch
from torch import Tensor

from saccade.kernels import HAS_TRITON, in_type, looking
from saccade.kernels.launch import Launch, planned
from saccade.kernels.linear import column_sum
from saccade.kernels.sizes import power_of_2

if HAS_TRITON:
    import triton
    import triton.language as tl
    from torch.library import custom_op

    from saccade.kernels.gelu import gelu, gelu_slope

    @triton.jit
    def _matrix(pointer, row, column, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
        """Where some rows and columns of a matrix (HEIGHT, WIDTH) lie, and which of them there are."""
        return pointer + row[:, None] * WIDTH + column[None, :], (row < HEIGHT)[:, None] & (column < WIDTH)[None, :]

    @triton.jit
    def _vector(pointer, at, LENGTH: tl.constexpr):
        """Some of its values, zeros beyond them."""
        return tl.load(pointer + at, mask=at < LENGTH, other=0.0).to(tl.float32)

    @triton.jit
    def _inside(x, w_pointer, b_pointer, channel, CHANNELS: tl.constexpr, PRECISION: tl.constexpr):
        """M, a = gelu(x M + b), and the slope there."""
        EXACT: tl.constexpr = w_pointer.dtype.element_ty == tl.float32
        where, known = _matrix(w_pointer, channel, channel, CHANNELS, CHANNELS)
        m = tl.load(where, mask=known, other=0.0)
        h = tl.dot(x, m, input_precision=PRECISION) + _vector(b_pointer, channel, CHANNELS)[None, :]
        return m, gelu(h, EXACT).to(m.dtype), gelu_slope(h, EXACT).to(m.dtype)

    @triton.jit
    def _outside(
        s, active, c_pointer, g_pointer, p, channel,
        POINTS: tl.constexpr, CHANNELS: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """The gradient of S a + c, in float32."""
        h = tl.dot(s, active, input_precision=PRECISION) + _vector(c_pointer, p, POINTS)[:, None]
        where, known = _matrix(g_pointer, p, channel, POINTS, CHANNELS)
        return tl.load(where, mask=known, other=0.0).to(tl.float32) * gelu_slope(h, s.dtype == tl.float32)

    @triton.jit
    def _back(s, g, slope, p_pointer, channel, CHANNELS: tl.constexpr, PRECISION: tl.constexpr):
        """The gradient of x M + b; the sums of its columns in p."""
        d = tl.dot(tl.trans(s), g, input_precision=PRECISION) * slope.to(tl.float32)
        tl.store(p_pointer + channel, tl.sum(d, 0), mask=channel < CHANNELS)
        return d.to(s.dtype)

    @triton.jit
    def _backward_kernel(
        g_pointer, x_pointer, w_pointer, b_pointer, c_pointer, dx_pointer, dw_pointer, p_pointer, step,
        POINTS: tl.constexpr, CHANNELS: tl.constexpr, P: tl.constexpr, C: tl.constexpr, SLICE: tl.constexpr,
        PRECISION: tl.constexpr,
    ):  # fmt: skip
        """Gradients of what was read, in dx, and of the matrices, in dw: `step` is from row to row in w, dw is dense.

        Rows of M's gradient come SLICE at once. Sizes are constants, so that the loads of odd ones are as wide as these
        allow. What is beyond them is zero in x, w and g, and so in every gradient. What a token adds to the gradients
        of b and c is in p (tokens, C + P).
        """
        token = tl.program_id(0).to(tl.int64)
        x_pointer += token * POINTS * CHANNELS
        g_pointer += token * POINTS * CHANNELS
        dx_pointer += token * POINTS * CHANNELS
        w_pointer += token * step
        dw_pointer += token * (CHANNELS * CHANNELS + POINTS * POINTS)
        p_pointer += token * (CHANNELS + POINTS)
        p, channel = tl.arange(0, P), tl.arange(0, C)
        where, known = _matrix(x_pointer, p, channel, POINTS, CHANNELS)
        x = tl.load(where, mask=known, other=0.0)
        where, known = _matrix(w_pointer + CHANNELS * CHANNELS, p, p, POINTS, POINTS)
        s = tl.load(where, mask=known, other=0.0)
        m, active, slope = _inside(x, w_pointer, b_pointer, channel, CHANNELS, PRECISION)
        g = _outside(s, active, c_pointer, g_pointer, p, channel, POINTS, CHANNELS, PRECISION)
        total = tl.sum(g, 1)
        g = g.to(s.dtype)
        d = _back(s, g, slope, p_pointer, channel, CHANNELS, PRECISION)
        to_s = tl.dot(g, tl.trans(active), input_precision=PRECISION)
        tl.store(p_pointer + CHANNELS + p, total, mask=p < POINTS)
        where, known = _matrix(dw_pointer + CHANNELS * CHANNELS, p, p, POINTS, POINTS)
        tl.store(where, to_s.to(s.dtype), mask=known)
        to_x = tl.dot(d, tl.trans(m), input_precision=PRECISION)
        where, known = _matrix(dx_pointer, p, channel, POINTS, CHANNELS)
        tl.store(where, to_x.to(s.dtype), mask=known)
        for start in tl.static_range(0, C, SLICE):
            row = start + tl.arange(0, SLICE)
            where, known = _matrix(x_pointer, p, row, POINTS, CHANNELS)
            x = tl.trans(tl.load(where, mask=known, other=0.0))
            where, known = _matrix(dw_pointer, row, channel, CHANNELS, CHANNELS)
            tl.store(where, tl.dot(x, d, input_precision=PRECISION).to(s.dtype), mask=known)

    def _tile(points: int, channels: int, exact: bool) -> dict[str, int]:
        """Points and channels, rows of the gradient at once, threads.

        The columns in two parts, 64 and 32 of 96 channels, would take fewer registers: Triton 3.6 makes of it a product
        that reads beyond its shared memory.
        """
        tall, wide = (max(16, power_of_2(number)) for number in (points, channels))
        few, warps = (32, 16) if exact else (64, 4)
        return dict(P=tall, C=wide, SLICE=min(few, wide), num_warps=warps)

    @planned
    def _differentiating(count: int, points: int, channels: int, step: int, exact: bool) -> Launch:
        """A token to a program; `step` is from one token's matrices to the next one's."""
        return Launch(
            _backward_kernel, (count,), step, POINTS=points, CHANNELS=channels,
            PRECISION="ieee" if exact else "tf32", **_tile(points, channels, exact),
        )  # fmt: skip

    def _rows(made: Tensor) -> Tensor:
        """made (B, M, C C + P P) with one step from token to token; a compiler may leave gaps, or another order."""
        batch_step, step, one = made.stride()
        return made if one == 1 and batch_step == made.shape[1] * step else made.contiguous()

    def _look(x: Tensor, points: Tensor, made: Tensor, channel_bias: Tensor, point_bias: Tensor) -> Tensor:
        """x (B, H, W, C), the rest as in `look` -> (B, M, P, C)."""
        made = _rows(made)
        _, tokens, count, _ = points.shape
        square, step, exact = x.shape[3] ** 2, made.stride(1), made.dtype == torch.float32
        y = torch.empty(*points.shape[:3], x.shape[3], dtype=made.dtype, device=x.device)
        start = looking._mixing(x.shape, tokens, count, (step, step), exact, looking.MIXED, looking.WARPS)
        point_weights = made.narrow(2, square, count * count)  # where it starts is all that matters
        start(x.contiguous(), points.contiguous(), made, point_weights, channel_bias, point_bias, y)
        return y

    def _look_gradients(
        g: Tensor, x: Tensor, points: Tensor, made: Tensor, channel_bias: Tensor, point_bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of x, points and made, and (C + P) of both biases in float32."""
        x, points, made = x.contiguous(), points.contiguous(), _rows(made)
        batch, tokens, count, _ = points.shape
        channels, exact = x.shape[3], made.dtype == torch.float32
        read = torch.empty(batch, tokens, count, channels, dtype=made.dtype, device=x.device)
        looking._sampling(False, x.shape, tokens, count)(x, points, read)
        to_read = torch.empty_like(read)
        to_made = torch.empty(made.shape, dtype=made.dtype, device=x.device)
        shared = torch.empty(batch * tokens, channels + count, dtype=torch.float32, device=x.device)
        start = _differentiating(batch * tokens, count, channels, made.stride(1), exact)
        start(g.contiguous(), read, made, channel_bias, point_bias, to_read, to_made, shared)
        return *looking._sample_gradients(to_read, x, points), to_made, column_sum(shared)

    def _shared(shared: Tensor, channel_bias: Tensor, point_bias: Tensor) -> tuple[Tensor, Tensor]:
        to_channels, to_points = shared.split((channel_bias.shape[0], point_bias.shape[0]))
        return in_type(to_channels, channel_bias.dtype), in_type(to_points, point_bias.dtype)

    class _Look(torch.autograd.Function):
        """Of maps (B, C, H, W): what is no operator needs no views of them."""

        @staticmethod
        def forward(
            ctx, features: Tensor, points: Tensor, made: Tensor, channel_bias: Tensor, point_bias: Tensor
        ) -> Tensor:
            ctx.save_for_backward(features, points, made, channel_bias, point_bias)
            return _look(features.permute(0, 2, 3, 1), points, made, channel_bias, point_bias)

        @staticmethod
        def backward(ctx, g: Tensor):
            features, *rest = ctx.saved_tensors
            to_x, to_points, to_made, shared = _look_gradients(g, features.permute(0, 2, 3, 1), *rest)
            return to_x.permute(0, 3, 1, 2), to_points, to_made, *_shared(shared, *rest[2:])

    _op = custom_op("saccade::look", _look, mutates_args=())
    _gradients_op = custom_op("saccade::look_backward", _look_gradients, mutates_args=())

    @_op.register_fake
    def _(x: Tensor, points: Tensor, made: Tensor, channel_bias: Tensor, point_bias: Tensor) -> Tensor:
        return made.new_empty(*points.shape[:3], x.shape[3])

    @_gradients_op.register_fake
    def _(
        g: Tensor, x: Tensor, points: Tensor, made: Tensor, channel_bias: Tensor, point_bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        shared = x.new_empty(x.shape[3] + points.shape[2], dtype=torch.float32)
        return x.new_empty(x.shape), points.new_empty(points.shape), made.new_empty(made.shape), shared

    def _save(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    def _backward(ctx, g: Tensor):
        *gradients, shared = _gradients_op(g, *ctx.saved_tensors)
        return *gradients, *_shared(shared, *ctx.saved_tensors[3:])

    _op.register_autograd(_backward, setup_context=_save)


def look(features: Tensor, points: Tensor, made: Tensor, channel_bias: Tensor, point_bias: Tensor) -> Tensor:
    """features (B, C, H, W), points (B, M, P, 2), made (B, M, C C + P P), biases (C), (P) -> mixed (B, M, P, C).

    In the type of `made`. The twin is `sample_and_mix` of saccade.tokens.regions, with views of `made`.
    """
    if torch.compiler.is_compiling():
        return _op(features.permute(0, 2, 3, 1), points, made, channel_bias, point_bias)
    return _Look.apply(features, points, made, channel_bias, point_bias)
