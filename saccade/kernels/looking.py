"""SparseFormer's look in three kernels instead of some sixty small steps.

place     regions adjusted and points placed in them, one program a token
sample    the map read at the points, with the gradients of map and points
mix       the map read at the points and mixed at once: what was read never leaves the chip (its gradient: mixing.py)

Their twins are `adjust` and `spread_points`, `sample`, and `sample_and_mix`, of saccade.layers and saccade.tokens. On
images only. Compilers take the last two as operators they do not look into; `place` they make from its twin.
"""

import torch
from torch import Tensor

from saccade.kernels import HAS_TRITON, in_type
from saccade.kernels.launch import Launch, planned
from saccade.kernels.sizes import parts, power_of_2

PROGRAMS = 528  # that add up the gradient of a grid, four for every multiprocessor of an H200
MIXED, WARPS = 16, 4  # points of a token that `mix` works on at once, and with how many warps

if HAS_TRITON:
    import triton
    import triton.language as tl
    from torch.library import custom_op

    from saccade.kernels.gelu import gelu

    @triton.jit
    def _along(at, length):
        """Of a coordinate in pixels along one axis: the first of its two neighbours, and the distance to it."""
        low = tl.minimum(tl.maximum(at, 0.0), tl.maximum(length - 2, 0).to(tl.float32)).to(tl.int32)
        return low, at - low.to(tl.float32)

    @triton.jit
    def _shares(away, length):
        """What the two neighbours count."""
        second = tl.maximum(1 - tl.abs(away - 1), 0.0)
        return tl.maximum(1 - tl.abs(away), 0.0), tl.where(length > 1, second, 0.0)

    @triton.jit
    def _slope(away):
        """Of max(0, 1 - |away|)."""
        sign = tl.where(away > 0, 1.0, tl.where(away < 0, -1.0, 0.0))
        return tl.where(tl.abs(away) < 1, -sign, 0.0)

    @triton.jit
    def _rows(x_pointer, pixel, share, channel, channels, held):
        """The pixels' channels, (P, C), where they count."""
        mask = (held & (share > 0))[:, None] & (channel < channels)[None, :]
        return tl.load(x_pointer + pixel[:, None] * channels + channel[None, :], mask=mask, other=0.0).to(tl.float32)

    @triton.jit
    def _places(q_pointer, token, p, height, width, points):
        """A token's points p: first neighbour in the list of the image's pixels, distances to it, which points are."""
        held = p < points
        start = q_pointer + (token.to(tl.int64) * points + p) * 2
        column, right = _along(tl.load(start, mask=held, other=0.0) * width - 0.5, width)
        row, below = _along(tl.load(start + 1, mask=held, other=0.0) * height - 0.5, height)
        return row * width + column, right, below, held

    @triton.jit
    def _read(x_pointer, first, right, below, height, width, channel, channels, held):
        """(P, C): the four neighbours of every point, weighted."""
        x0, x1 = _shares(right, width)
        y0, y1 = _shares(below, height)
        total = (y0 * x0)[:, None] * _rows(x_pointer, first, y0 * x0, channel, channels, held)
        total += (y0 * x1)[:, None] * _rows(x_pointer, first + 1, y0 * x1, channel, channels, held)
        total += (y1 * x0)[:, None] * _rows(x_pointer, first + width, y1 * x0, channel, channels, held)
        total += (y1 * x1)[:, None] * _rows(x_pointer, first + width + 1, y1 * x1, channel, channels, held)
        return total

    @triton.jit
    def _sample_kernel(
        x_pointer, q_pointer, y_pointer, height, width, channels, points, tokens, P: tl.constexpr, C: tl.constexpr
    ):
        token = tl.program_id(0)
        channel, p = tl.arange(0, C), tl.program_id(1) * P + tl.arange(0, P)
        first, right, below, held = _places(q_pointer, token, p, height, width, points)
        x_pointer += (token // tokens).to(tl.int64) * height * width * channels
        y = _read(x_pointer, first, right, below, height, width, channel, channels, held)
        y_pointer += token.to(tl.int64) * points * channels
        mask = held[:, None] & (channel < channels)[None, :]
        tl.store(y_pointer + p[:, None] * channels + channel[None, :], y.to(y_pointer.dtype.element_ty), mask=mask)

    @triton.jit
    def _give(d_pointer, pixel, share, g, channel, channels, held):
        """Add a point's gradient to one of its pixels: others may do so at the same time.

        Nobody reads the sums before the kernel is done; any other order of memory empties caches at every addition.
        """
        mask = (held & (share > 0))[:, None] & (channel < channels)[None, :]
        at = d_pointer + pixel[:, None] * channels + channel[None, :]
        tl.atomic_add(at, share[:, None] * g, mask=mask, sem="relaxed")

    @triton.jit
    def _sample_backward_kernel(
        g_pointer, x_pointer, q_pointer, d_pointer, p_pointer, height, width, channels, points, tokens,
        P: tl.constexpr, C: tl.constexpr,
    ):  # fmt: skip
        """Gradients of the map, added up in d (float32, zeros before), and of the points, in p."""
        token = tl.program_id(0)
        channel, p = tl.arange(0, C), tl.program_id(1) * P + tl.arange(0, P)
        first, right, below, held = _places(q_pointer, token, p, height, width, points)
        image = (token // tokens).to(tl.int64) * height * width * channels
        x_pointer, d_pointer = x_pointer + image, d_pointer + image
        x0, x1 = _shares(right, width)
        y0, y1 = _shares(below, height)
        g_pointer += token.to(tl.int64) * points * channels
        mask = held[:, None] & (channel < channels)[None, :]
        g = tl.load(g_pointer + p[:, None] * channels + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        # A share of zero has a slope beside it, so here every neighbour is read that there is.
        wide, high = width > 1, height > 1
        one = tl.zeros((P,), tl.float32) + 1
        to_right, to_below = tl.where(wide, one, 0.0), tl.where(high, one, 0.0)
        a = tl.sum(g * _rows(x_pointer, first, one, channel, channels, held), 1)
        b = tl.sum(g * _rows(x_pointer, first + 1, to_right, channel, channels, held), 1)
        c = tl.sum(g * _rows(x_pointer, first + width, to_below, channel, channels, held), 1)
        d = tl.sum(g * _rows(x_pointer, first + width + 1, to_right * to_below, channel, channels, held), 1)
        along_x = _slope(right) * (y0 * a + y1 * c) + to_right * _slope(right - 1) * (y0 * b + y1 * d)
        along_y = _slope(below) * (x0 * a + x1 * b) + to_below * _slope(below - 1) * (x0 * c + x1 * d)
        start = p_pointer + (token.to(tl.int64) * points + p) * 2
        tl.store(start, along_x * width, mask=held)
        tl.store(start + 1, along_y * height, mask=held)
        _give(d_pointer, first, y0 * x0, g, channel, channels, held)
        _give(d_pointer, first + 1, y0 * x1, g, channel, channels, held)
        _give(d_pointer, first + width, y1 * x0, g, channel, channels, held)
        _give(d_pointer, first + width + 1, y1 * x1, g, channel, channels, held)

    @triton.jit
    def _mix_kernel(
        x_pointer, q_pointer, c_pointer, m_pointer, cb_pointer, mb_pointer, y_pointer, height, width, channels, points,
        tokens, c_step, m_step,
        P: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """y = gelu(M gelu(S C + cb) + mb), S (P, C) what a token read, C and M the matrices it made.

        A chunk of points at a time is read, mixed over its channels, and added to what every point gets from it: so
        few registers are held that several tokens are under way at once on a multiprocessor.
        """
        EXACT: tl.constexpr = y_pointer.dtype.element_ty == tl.float32
        token = tl.program_id(0)
        channel, p = tl.arange(0, C), tl.arange(0, P)
        held = p < points
        x_pointer += (token // tokens).to(tl.int64) * height * width * channels
        known = channel < channels
        square = known[:, None] & known[None, :]
        offset = channel[:, None] * channels + channel[None, :]
        weights = tl.load(c_pointer + token.to(tl.int64) * c_step + offset, mask=square, other=0.0)
        bias = tl.load(cb_pointer + channel, mask=known, other=0.0).to(tl.float32)[None, :]
        m_pointer += token.to(tl.int64) * m_step
        mixed = tl.zeros((P, C), tl.float32)
        for chunk in tl.static_range(CHUNKS):
            q = chunk * CHUNK + tl.arange(0, CHUNK)
            first, right, below, here = _places(q_pointer, token, q, height, width, points)
            sampled = _read(x_pointer, first, right, below, height, width, channel, channels, here)
            sampled = gelu(tl.dot(sampled.to(weights.dtype), weights, input_precision=PRECISION) + bias, EXACT)
            there = held[:, None] & here[None, :]
            across = tl.load(m_pointer + p[:, None] * points + q[None, :], mask=there, other=0.0)  # (P, CHUNK)
            mixed += tl.dot(across, sampled.to(across.dtype), input_precision=PRECISION)
        mixed = gelu(mixed + tl.load(mb_pointer + p, mask=held, other=0.0).to(tl.float32)[:, None], EXACT)
        y_pointer += token.to(tl.int64) * points * channels
        offset = p[:, None] * channels + channel[None, :]
        tl.store(y_pointer + offset, mixed.to(y_pointer.dtype.element_ty), mask=held[:, None] & known[None, :])

    @triton.jit
    def _place_kernel(
        d_pointer, r_pointer, o_pointer, g_pointer, n_pointer, q_pointer, points, scale, eps, limit, P: tl.constexpr
    ):
        """One axis of one token: its region's new ends in n, its points in q; d deltas, o offsets, g their grid."""
        token, axis = tl.program_id(0).to(tl.int64), tl.program_id(1)
        low, high = tl.load(r_pointer + token * 4 + axis), tl.load(r_pointer + token * 4 + 2 + axis)
        centre, size = (low + high) / 2, high - low
        shift = tl.load(d_pointer + token * 4 + axis).to(tl.float32)
        growth = tl.load(d_pointer + token * 4 + 2 + axis).to(tl.float32)
        centre += shift * size
        size *= tl.exp(tl.minimum(tl.maximum(growth, -limit), limit))
        low, high = centre - size / 2, centre + size / 2
        tl.store(n_pointer + token * 4 + axis, low)
        tl.store(n_pointer + token * 4 + 2 + axis, high)
        centre, size = (low + high) / 2, high - low
        p = tl.arange(0, P)
        held = p < points
        offset = tl.load(o_pointer + (token * points + p) * 2 + axis, mask=held, other=0.0).to(tl.float32)
        offset += tl.load(g_pointer + p * 2 + axis, mask=held, other=0.0).to(tl.float32)
        offset = tl.where(held, offset - tl.sum(tl.where(held, offset, 0.0), 0) / points, 0.0)
        spread = 3 * (tl.sqrt(tl.sum(offset * offset, 0) / (points - 1)) + eps)
        tl.store(q_pointer + (token * points + p) * 2 + axis, centre + scale * (offset / spread) * size, mask=held)

    @triton.jit
    def _place_backward_kernel(
        h_pointer, f_pointer, d_pointer, r_pointer, o_pointer, g_pointer, gd_pointer, gr_pointer, go_pointer,
        gg_pointer, tokens, points, scale, eps, limit, P: tl.constexpr,
    ):  # fmt: skip
        """One axis of some tokens, back: from h of the regions and f of the points to gd of the deltas, gr of the old
        regions, go of the offsets, and gg of their grid, added up over the program's tokens.
        """
        axis, p = tl.program_id(1), tl.arange(0, P)
        held = p < points
        grid = tl.load(g_pointer + p * 2 + axis, mask=held, other=0.0).to(tl.float32)
        to_grid = tl.zeros((P,), tl.float32)
        for one in range(tl.program_id(0), tokens, tl.num_programs(0)):
            corner = one * 4 + axis
            place = (one * points + p) * 2 + axis
            size = tl.load(r_pointer + corner + 2) - tl.load(r_pointer + corner)
            shift = tl.load(d_pointer + corner).to(tl.float32)
            growth = tl.load(d_pointer + corner + 2).to(tl.float32)
            grown = tl.exp(tl.minimum(tl.maximum(growth, -limit), limit))
            offset = tl.load(o_pointer + place, mask=held, other=0.0).to(tl.float32) + grid
            offset = tl.where(held, offset - tl.sum(tl.where(held, offset, 0.0), 0) / points, 0.0)
            deviation = tl.sqrt(tl.sum(offset * offset, 0) / (points - 1))
            spread = 3 * (deviation + eps)
            g = tl.load(f_pointer + place, mask=held, other=0.0)
            g_low, g_high = tl.load(h_pointer + corner), tl.load(h_pointer + corner + 2)
            along = tl.sum(g * offset, 0) * scale / spread  # what a larger region would move the points by
            to_centre = g_low + g_high + tl.sum(g, 0)
            to_grown = (g_high - g_low) / 2 + along
            to_size = to_centre * shift + to_grown * grown
            tl.store(gd_pointer + corner, (to_centre * size).to(gd_pointer.dtype.element_ty))
            free = (growth >= -limit) & (growth <= limit)
            to_growth = tl.where(free, to_grown * grown * size, 0.0)
            tl.store(gd_pointer + corner + 2, to_growth.to(gd_pointer.dtype.element_ty))
            tl.store(gr_pointer + corner, to_centre / 2 - to_size)
            tl.store(gr_pointer + corner + 2, to_centre / 2 + to_size)
            g = g * (scale * size * grown / spread)
            g = tl.where(held, g - tl.sum(g, 0) / points, 0.0)
            steep = 3 * along * size * grown / (spread * (points - 1))  # of the spread, which divides all offsets
            g -= steep * offset / tl.where(deviation > 0, deviation, 1.0)  # equal offsets are zero
            tl.store(go_pointer + place, g.to(go_pointer.dtype.element_ty), mask=held)
            to_grid += g
        tl.store(gg_pointer + (tl.program_id(0) * points + p) * 2 + axis, to_grid, mask=held)

    def _block(number: int) -> int:
        return max(16, power_of_2(number))

    @planned
    def _sampling(backward: bool, x_shape: tuple[int, ...], tokens: int, points: int) -> Launch:
        """A program takes 16 points of a token."""
        batch, height, width, channels = x_shape
        kernel, grid = _sample_backward_kernel if backward else _sample_kernel, (batch * tokens, parts(points, 16))
        return Launch(kernel, grid, height, width, channels, points, tokens, P=16, C=_block(channels))

    @planned
    def _mixing(
        x_shape: tuple[int, ...], tokens: int, points: int, steps: tuple[int, int], exact: bool, most: int, warps: int
    ) -> Launch:
        """All points of a token in a program, `most` at once; `steps` from one token's matrices to the next one's."""
        batch, height, width, channels = x_shape
        block = min(64, _block(points))
        chunk = min(most, block)
        return Launch(
            _mix_kernel, (batch * tokens, parts(points, block)), height, width, channels, points, tokens, *steps,
            P=block, C=_block(channels), CHUNK=chunk, CHUNKS=parts(points, chunk),
            PRECISION="ieee" if exact else "tf32", num_warps=warps,
        )  # fmt: skip

    @planned
    def _placing(count: int, points: int, scale: float, eps: float, limit: float) -> Launch:
        return Launch(_place_kernel, (count, 2), points, scale, eps, limit, P=_block(points))

    @planned
    def _placing_back(count: int, points: int, scale: float, eps: float, limit: float) -> tuple[int, Launch]:
        """Programs along each axis, and their launch."""
        programs = min(PROGRAMS, count)
        numbers = count, points, scale, eps, limit
        return programs, Launch(_place_backward_kernel, (programs, 2), *numbers, P=_block(points), num_warps=1)

    def _sample(x: Tensor, points: Tensor) -> Tensor:
        x, points = x.contiguous(), points.contiguous()
        batch, tokens, count, _ = points.shape
        y = x.new_empty(batch, tokens, count, x.shape[3])
        _sampling(False, x.shape, tokens, count)(x, points, y)
        return y

    def _sample_gradients(g: Tensor, x: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        x, points = x.contiguous(), points.contiguous()
        to_x = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        to_points = torch.empty_like(points)
        _sampling(True, x.shape, points.shape[1], points.shape[2])(g.contiguous(), x, points, to_x, to_points)
        return in_type(to_x, x.dtype), to_points

    class _Sample(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, points: Tensor) -> Tensor:
            ctx.save_for_backward(x, points)
            return _sample(x, points)

        @staticmethod
        def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor]:
            return _sample_gradients(g, *ctx.saved_tensors)

    def _mix(
        x: Tensor, points: Tensor, channel_weights: Tensor, point_weights: Tensor, channel_bias: Tensor,
        point_bias: Tensor,
    ) -> Tensor:  # fmt: skip
        if not mixes(channel_weights, point_weights):  # a compiler may hand them on in another order
            channel_weights, point_weights = channel_weights.contiguous(), point_weights.contiguous()
        batch, tokens, count, _ = points.shape
        y = channel_weights.new_empty(batch, tokens, count, x.shape[3])
        steps, exact = (channel_weights.stride(1), point_weights.stride(1)), channel_weights.dtype == torch.float32
        start = _mixing(x.shape, tokens, count, steps, exact, MIXED, WARPS)
        start(x.contiguous(), points.contiguous(), channel_weights, point_weights, channel_bias, point_bias, y)
        return y

    def _place(
        deltas: Tensor, regions: Tensor, offsets: Tensor, grid: Tensor, scale: float, eps: float, limit: float
    ) -> tuple[Tensor, Tensor]:
        count, points = regions.shape[0] * regions.shape[1], grid.numel() // 2
        new = torch.empty_like(regions)
        places = regions.new_empty(*regions.shape[:2], points, 2)
        start = _placing(count, points, scale, eps, limit)
        start(deltas.contiguous(), regions.contiguous(), offsets.contiguous(), grid, new, places)
        return new, places

    def _place_gradients(
        to_regions: Tensor, to_points: Tensor, deltas: Tensor, regions: Tensor, offsets: Tensor, grid: Tensor,
        scale: float, eps: float, limit: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Of deltas, regions, offsets and grid."""
        points = grid.numel() // 2
        programs, start = _placing_back(regions.shape[0] * regions.shape[1], points, scale, eps, limit)
        deltas, regions, offsets = deltas.contiguous(), regions.contiguous(), offsets.contiguous()
        found = torch.empty_like(deltas), torch.empty_like(regions), torch.empty_like(offsets)
        partial = torch.empty(programs, 2 * points, dtype=torch.float32, device=grid.device)
        start(to_regions.contiguous(), to_points.contiguous(), deltas, regions, offsets, grid, *found, partial)
        return *found, in_type(partial.sum(0), grid.dtype)

    _sample_op = custom_op("saccade::sample", _sample, mutates_args=())
    _sample_gradients_op = custom_op("saccade::sample_backward", _sample_gradients, mutates_args=())
    _mix_op = custom_op("saccade::mix", _mix, mutates_args=())
    _place_op = custom_op("saccade::place", _place, mutates_args=())

    @_sample_op.register_fake
    def _(x: Tensor, points: Tensor) -> Tensor:
        return x.new_empty(*points.shape[:3], x.shape[3])

    @_sample_gradients_op.register_fake
    def _(g: Tensor, x: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape), points.new_empty(points.shape)

    @_mix_op.register_fake
    def _(
        x: Tensor, points: Tensor, channel_weights: Tensor, point_weights: Tensor, channel_bias: Tensor,
        point_bias: Tensor,
    ) -> Tensor:  # fmt: skip
        return channel_weights.new_empty(*points.shape[:3], x.shape[3])

    @_place_op.register_fake
    def _(
        deltas: Tensor, regions: Tensor, offsets: Tensor, grid: Tensor, scale: float, eps: float, limit: float
    ) -> tuple[Tensor, Tensor]:
        new = torch.empty_like(regions)
        return new, regions.new_empty(*regions.shape[:2], grid.numel() // 2, 2)

    def _save_sample(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    def _sample_backward(ctx, g: Tensor) -> tuple[Tensor, Tensor]:
        return _sample_gradients_op(g, *ctx.saved_tensors)

    _sample_op.register_autograd(_sample_backward, setup_context=_save_sample)

    class _Place(torch.autograd.Function):
        @staticmethod
        def forward(ctx, deltas, regions, offsets, grid, scale: float, eps: float, limit: float):
            ctx.save_for_backward(deltas, regions, offsets, grid)
            ctx.constants = scale, eps, limit
            return _place(deltas, regions, offsets, grid, scale, eps, limit)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g_regions: Tensor, g_points: Tensor):
            return *_place_gradients(g_regions, g_points, *ctx.saved_tensors, *ctx.constants), None, None, None


def sample(x: Tensor, points: Tensor) -> Tensor:
    """x (B, H, W, C), points (B, M, P, 2) -> (B, M, P, C) in the type of x."""
    return (_sample_op if torch.compiler.is_compiling() else _Sample.apply)(x, points)


def mix(
    x: Tensor, points: Tensor, channel_weights: Tensor, point_weights: Tensor, channel_bias: Tensor, point_bias: Tensor
) -> Tensor:
    """x (B, H, W, C), points (B, M, P, 2), matrices (B, M, C, C), (B, M, P, P), biases -> (B, M, P, C); no gradient."""
    fused = _mix_op if torch.compiler.is_compiling() else _mix
    return fused(x, points, channel_weights, point_weights, channel_bias, point_bias)


def mixes(*matrices: Tensor) -> bool:
    """Whether `mix` can read these (B, M, n, n): each matrix in one piece, one step from token to token."""
    return all(
        matrix.stride()[2:] == (matrix.shape[3], 1) and matrix.stride(0) == matrix.shape[1] * matrix.stride(1)
        for matrix in matrices
    )


def place(
    deltas: Tensor, regions: Tensor, offsets: Tensor, grid: Tensor, scale: float, eps: float, limit: float = 8.0
) -> tuple[Tensor, Tensor]:
    """deltas (B, M, 4), regions (B, M, 4), offsets (B, M, 2 P) and their grid (2 P)
    -> regions (B, M, 4), points (B, M, P, 2). Compilers have no way back through it."""
    run = _place_op if torch.compiler.is_compiling() else _Place.apply
    return run(deltas, regions.contiguous(), offsets, grid, scale, eps, limit)
