"""Attention among at most 64 vectors, straight from their fused projection to the mixed values.

The library's kernels are made for long lists: they take tiles of 64 to 128 vectors of one head, heads of 8 channels or
more, and want queries, keys and values apart. Here a program takes all vectors of one image and 16 or more channels of
all three, which are several small heads or one large; other heads' channels count as zero in a head's scores. Nothing
is copied before or behind it, and backward computes the weights again instead of keeping them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels import HAS_TRITON, learns
from saccade.kernels.launch import Launch, planned, traced
from saccade.kernels.sizes import power_of_2

LONGEST = 64  # vectors
WIDEST = 64  # channels of a head


def is_short(qkv: Tensor, num_heads: int) -> bool:
    """Whether the list is short and its heads have at most 64 channels; those of 4 and 8 come in groups of 16."""
    dim = qkv.shape[-1] // 3
    width = dim // num_heads
    fits = 16 <= width <= WIDEST or (width in (4, 8) and dim % 16 == 0)
    return qkv.ndim == 3 and qkv.shape[1] <= LONGEST and fits and qkv.is_contiguous()


def plain_attention(qkv: Tensor, num_heads: int, bias: Tensor | None = None) -> Tensor:
    """The twin, for any length: qkv (B, M, 3 D), bias (heads, M, M) of the scores -> mixed values (B, M, D)."""
    query, key, value = qkv.unflatten(2, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, M, D/heads)
    if bias is not None:
        bias = bias.to(query.dtype)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias).transpose(1, 2).flatten(2)


if HAS_TRITON:
    import triton
    import triton.language as tl
    from torch.library import triton_op

    @triton.jit
    def _place(count, ROWS: tl.constexpr, CHANNELS: tl.constexpr, STEP: tl.constexpr):
        """Vectors of this program's image (M, 1), its channels (1, C), which of both there are, and which keys."""
        row, lane = tl.arange(0, ROWS), tl.arange(0, CHANNELS)
        vector = tl.program_id(0).to(tl.int64) * count + row
        channel = tl.program_id(1) * STEP + lane
        mask = (row < count)[:, None] & (lane < STEP)[None, :]
        return vector[:, None], channel[None, :], mask, (row < count)[None, :]

    @triton.jit
    def _weights(query, key, scale, mine, held, EXACT: tl.constexpr):
        """Softmax over the keys of one head (M, M); channels of other heads count as zero."""
        scores = tl.dot(tl.where(mine, query, 0.0).to(key.dtype), tl.trans(key), input_precision=EXACT)
        scores = scores * tl.cast(scale, tl.float32)  # compilers (torch 2.11) hand it over as float64
        scores = tl.where(held, scores, float("-inf"))
        scores = tl.exp(scores - tl.max(scores, 1)[:, None])
        return scores / tl.sum(scores, 1)[:, None]

    @triton.jit
    def _forward_kernel(
        x_pointer, y_pointer, count, dim, scale,
        ROWS: tl.constexpr, CHANNELS: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        vector, channel, mask, held = _place(count, ROWS, CHANNELS, STEP)
        lane = tl.arange(0, CHANNELS)
        place = x_pointer + vector * (3 * dim) + channel
        query = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        key = tl.load(place + dim, mask=mask, other=0.0)
        value = tl.load(place + 2 * dim, mask=mask, other=0.0)
        mixed = tl.zeros((ROWS, CHANNELS), tl.float32)
        for head in tl.static_range(STEP // WIDTH):
            mine = (lane // WIDTH == head)[None, :]
            weights = _weights(query, key, scale, mine, held, EXACT)
            found = tl.dot(weights.to(value.dtype), value, input_precision=EXACT)
            mixed += tl.where(mine, found, 0.0)
        tl.store(y_pointer + vector * dim + channel, mixed.to(y_pointer.dtype.element_ty), mask=mask)

    @triton.jit
    def _backward_kernel(
        g_pointer, x_pointer, d_pointer, count, dim, scale,
        ROWS: tl.constexpr, CHANNELS: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        vector, channel, mask, held = _place(count, ROWS, CHANNELS, STEP)
        lane = tl.arange(0, CHANNELS)
        offset = vector * (3 * dim) + channel
        query = tl.load(x_pointer + offset, mask=mask, other=0.0).to(tl.float32)
        key = tl.load(x_pointer + offset + dim, mask=mask, other=0.0)
        value = tl.load(x_pointer + offset + 2 * dim, mask=mask, other=0.0)
        gradient = tl.load(g_pointer + vector * dim + channel, mask=mask, other=0.0).to(tl.float32)
        to_query = tl.zeros((ROWS, CHANNELS), tl.float32)
        to_key = tl.zeros((ROWS, CHANNELS), tl.float32)
        to_value = tl.zeros((ROWS, CHANNELS), tl.float32)
        for head in tl.static_range(STEP // WIDTH):
            mine = (lane // WIDTH == head)[None, :]
            weights = _weights(query, key, scale, mine, held, EXACT)
            own = tl.where(mine, gradient, 0.0).to(value.dtype)  # of this head: zero in the channels of others
            to_value += tl.dot(tl.trans(weights.to(value.dtype)), own, input_precision=EXACT)
            along = tl.dot(own, tl.trans(value), input_precision=EXACT)  # gradient of the weights
            along = weights * (along - tl.sum(weights * along, 1)[:, None])
            along = along * tl.cast(scale, tl.float32)  # and of the scores
            along = along.to(key.dtype)
            to_query += tl.where(mine, tl.dot(along, key, input_precision=EXACT), 0.0)
            asked = tl.where(mine, query, 0.0).to(key.dtype)
            to_key += tl.dot(tl.trans(along), asked, input_precision=EXACT)
        dtype = d_pointer.dtype.element_ty
        tl.store(d_pointer + offset, to_query.to(dtype), mask=mask)
        tl.store(d_pointer + offset + dim, to_key.to(dtype), mask=mask)
        tl.store(d_pointer + offset + 2 * dim, to_value.to(dtype), mask=mask)

    @planned
    def _attending(backward: bool, batch: int, count: int, dim: int, num_heads: int, exact: bool) -> Launch:
        width = dim // num_heads
        step = max(16, width)  # channels of a program: several small heads, or one
        channels = power_of_2(step)
        rows = max(16, power_of_2(count))
        # The scores live in registers: with fewer warps than these the backward pass spills (ptxas for sm_90a).
        warps = rows // 16 * (2 if channels == WIDEST else 1)
        precision = "ieee" if exact else "tf32"
        tile = dict(ROWS=rows, CHANNELS=channels, STEP=step, WIDTH=width, EXACT=precision, num_warps=warps)
        kernel = _backward_kernel if backward else _forward_kernel
        return Launch(kernel, (batch, dim // step), count, dim, width**-0.5, **tile)

    def _forward(qkv: Tensor, num_heads: int) -> Tensor:
        """qkv (B, M, 3 D), contiguous -> mixed values (B, M, D)."""
        batch, count, triple = qkv.shape
        mixed = torch.empty(batch, count, triple // 3, dtype=qkv.dtype, device=qkv.device)
        _attending(False, batch, count, triple // 3, num_heads, qkv.dtype == torch.float32)(qkv, mixed)
        return mixed

    def _gradient(g: Tensor, qkv: Tensor, num_heads: int) -> Tensor:
        """Gradient of the mixed values (B, M, D) -> of qkv (B, M, 3 D)."""
        batch, count, triple = qkv.shape
        g_qkv = torch.empty_like(qkv)
        _attending(True, batch, count, triple // 3, num_heads, qkv.dtype == torch.float32)(g, qkv, g_qkv)
        return g_qkv

    class _ShortAttention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, qkv: Tensor, num_heads: int) -> Tensor:
            _save(ctx, (qkv, num_heads), None)
            return _forward(qkv, num_heads)

        @staticmethod
        def backward(ctx, g: Tensor):
            return _backward(ctx, g, gradient=_gradient)

    _op = triton_op("saccade::short_attention", traced(_forward), mutates_args={})
    _gradient_op = triton_op("saccade::short_attention_backward", traced(_gradient), mutates_args={})

    def _save(ctx, inputs, output) -> None:
        qkv, ctx.num_heads = inputs
        ctx.save_for_backward(qkv)

    def _backward(ctx, g: Tensor, gradient=_gradient_op):
        (qkv,) = ctx.saved_tensors
        return gradient(g.contiguous(), qkv, ctx.num_heads), None

    _op.register_autograd(_backward, setup_context=_save)


def short_attention(qkv: Tensor, num_heads: int) -> Tensor:
    """qkv (B, M, 3 D), contiguous, M at most 64 -> mixed values (B, M, D)."""
    if torch.compiler.is_compiling():
        return _op(qkv, num_heads)
    if learns(qkv):
        return _ShortAttention.apply(qkv, num_heads)
    return _forward(qkv, num_heads)
