"""Multi-head attention, mostly with few tokens on one side.

Kernels for few tokens, and PyTorch's attention otherwise. On recent GPUs PyTorch prefers cuDNN's, which builds an
execution plan for every new shape: 50 ms and more per layer and pass (H200, cuDNN 9). Eager calls, whose image sizes
may change, use flash attention instead; torch.compile and `saccade.optimize(..., cuda_graph=True)`, whose shapes are
fixed, what PyTorch prefers.
"""

from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from saccade.ops import _dispatch as dispatch
from saccade.ops._dispatch import FusedOp, Op, register_op
from saccade.ops._launch import HAS_TRITON, Kernel, cdiv, jit, next_power_of_2, variant

if HAS_TRITON:
    import triton
    import triton.language as tl

WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _avoids_plans(first: Tensor, *inputs: Any, **options: Any) -> bool:
    """Whether cuDNN would build a plan that the next call may not need: half precision in eager mode on a GPU."""
    return dispatch.on_gpu(first) and dispatch.same_half_dtype(first) and dispatch.may_change_shape()


def _add_flash(op: Op[..., Tensor]) -> None:
    """Add the implementation "flash" to an operation: its reference without cuDNN."""
    reference = op.reference

    @op.add("flash", supports=_avoids_plans)
    def flash(*inputs: Any, **options: Any) -> Tensor:
        with sdpa_kernel(WITHOUT_PLANS):
            return reference(*inputs, **options)


# Self-attention among at most 64 tokens, from the fused projection to the mixed values.
#
# Flash attention takes tiles of 64 to 128 tokens of one head, heads of 8 channels or more, and wants queries, keys and
# values apart. Here a program takes all tokens of one image and 16 or more channels of all three: several small heads,
# or one large. Channels of other heads count as zero in a head's scores. Backward recomputes the probabilities.

MAX_TOKENS = 64
MAX_HEAD_DIM = 64


def self_attention_reference(qkv: Tensor, num_heads: int, bias: Tensor | None = None) -> Tensor:
    """qkv (B, M, 3 D), optional bias (heads, M, M) of the scores -> mixed values (B, M, D)."""
    query, key, value = qkv.unflatten(2, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, M, D/heads)
    if bias is not None:
        bias = bias.to(query.dtype)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias).transpose(1, 2).flatten(2)


if HAS_TRITON:

    @triton.jit
    def _self_tile(count, ROWS: tl.constexpr, CHANNELS: tl.constexpr, STEP: tl.constexpr):
        """Token indices (M, 1) and channels (1, C) of this program, the mask of both, and the mask of the keys."""
        row, lane = tl.arange(0, ROWS), tl.arange(0, CHANNELS)
        token = tl.program_id(0).to(tl.int64) * count + row
        channel = tl.program_id(1) * STEP + lane
        mask = (row < count)[:, None] & (lane < STEP)[None, :]
        return token[:, None], channel[None, :], mask, (row < count)[None, :]

    @triton.jit
    @no_type_check
    def _self_probabilities(query, key, own, key_mask, SCALE: tl.constexpr, PRECISION: tl.constexpr):
        """Softmax over the keys of one head (M, M); channels of other heads count as zero."""
        scores = tl.dot(tl.where(own, query, 0.0).to(key.dtype), tl.trans(key), input_precision=PRECISION) * SCALE
        scores = tl.where(key_mask, scores, float("-inf"))
        scores = tl.exp(scores - tl.max(scores, 1)[:, None])
        return scores / tl.sum(scores, 1)[:, None]

    @jit
    @no_type_check
    def _self_forward_kernel(
        qkv_ptr, mixed_ptr, count,
        DIM: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, STEP: tl.constexpr,
        WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        token, channel, mask, key_mask = _self_tile(count, ROWS, CHANNELS, STEP)
        lane = tl.arange(0, CHANNELS)
        source = qkv_ptr + token * (3 * DIM) + channel
        query = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        key = tl.load(source + DIM, mask=mask, other=0.0)
        value = tl.load(source + 2 * DIM, mask=mask, other=0.0)
        mixed = tl.zeros((ROWS, CHANNELS), tl.float32)
        for head in tl.static_range(STEP // WIDTH):
            own = (lane // WIDTH == head)[None, :]
            probabilities = _self_probabilities(query, key, own, key_mask, SCALE, PRECISION)
            mixed += tl.where(own, tl.dot(probabilities.to(value.dtype), value, input_precision=PRECISION), 0.0)
        tl.store(mixed_ptr + token * DIM + channel, mixed.to(mixed_ptr.dtype.element_ty), mask=mask)

    @jit
    @no_type_check
    def _self_backward_kernel(
        g_ptr, qkv_ptr, g_qkv_ptr, count,
        DIM: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, STEP: tl.constexpr,
        WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        token, channel, mask, key_mask = _self_tile(count, ROWS, CHANNELS, STEP)
        lane = tl.arange(0, CHANNELS)
        offset = token * (3 * DIM) + channel
        query = tl.load(qkv_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        key = tl.load(qkv_ptr + offset + DIM, mask=mask, other=0.0)
        value = tl.load(qkv_ptr + offset + 2 * DIM, mask=mask, other=0.0)
        g = tl.load(g_ptr + token * DIM + channel, mask=mask, other=0.0).to(tl.float32)
        g_query = tl.zeros((ROWS, CHANNELS), tl.float32)
        g_key = tl.zeros((ROWS, CHANNELS), tl.float32)
        g_value = tl.zeros((ROWS, CHANNELS), tl.float32)
        for head in tl.static_range(STEP // WIDTH):
            own = (lane // WIDTH == head)[None, :]
            probabilities = _self_probabilities(query, key, own, key_mask, SCALE, PRECISION)
            g_own = tl.where(own, g, 0.0).to(value.dtype)
            g_value += tl.dot(tl.trans(probabilities.to(value.dtype)), g_own, input_precision=PRECISION)
            g_scores = tl.dot(g_own, tl.trans(value), input_precision=PRECISION)
            g_scores = probabilities * (g_scores - tl.sum(probabilities * g_scores, 1)[:, None]) * SCALE
            g_scores = g_scores.to(key.dtype)
            g_query += tl.where(own, tl.dot(g_scores, key, input_precision=PRECISION), 0.0)
            own_query = tl.where(own, query, 0.0).to(key.dtype)
            g_key += tl.dot(tl.trans(g_scores), own_query, input_precision=PRECISION)
        dtype = g_qkv_ptr.dtype.element_ty
        tl.store(g_qkv_ptr + offset, g_query.to(dtype), mask=mask)
        tl.store(g_qkv_ptr + offset + DIM, g_key.to(dtype), mask=mask)
        tl.store(g_qkv_ptr + offset + 2 * DIM, g_value.to(dtype), mask=mask)


SELF_TILES = (16, 32, MAX_TOKENS)  # tokens of a program


@variant
def _self_kernel(backward: bool, tokens: int, dim: int, num_heads: int, dtype: torch.dtype) -> Kernel:
    width = dim // num_heads
    step = max(16, width)  # channels of a program: several small heads, or one
    channels = next_power_of_2(step)
    # The scores stay in registers: backward spills with fewer warps than these (ptxas, sm_90a).
    warps = tokens // 16 * (2 if channels == MAX_HEAD_DIM else 1)
    return Kernel(
        _self_backward_kernel if backward else _self_forward_kernel, DIM=dim, SCALE=width**-0.5, ROWS=tokens,
        CHANNELS=channels, STEP=step, WIDTH=width, PRECISION="ieee" if dtype == torch.float32 else "tf32",
        num_warps=warps,
    )  # fmt: skip


def _tile(tiles: tuple[int, ...], size: int) -> int:
    """The first of these tiles that holds so many rows."""
    return next(tile for tile in tiles if size <= tile)


def _self_forward(qkv: Tensor, num_heads: int) -> Tensor:
    batch, count, triple = qkv.shape
    mixed = torch.empty(batch, count, triple // 3, dtype=qkv.dtype, device=qkv.device)
    kernel = _self_kernel(False, _tile(SELF_TILES, count), triple // 3, num_heads, qkv.dtype)
    kernel((batch, triple // 3 // kernel.constants["STEP"]), qkv.contiguous(), mixed, count)
    return mixed


def _self_gradients(g: Tensor, qkv: Tensor, num_heads: int) -> Tensor:
    batch, count, triple = qkv.shape
    qkv = qkv.contiguous()
    g_qkv = torch.empty_like(qkv)
    kernel = _self_kernel(True, _tile(SELF_TILES, count), triple // 3, num_heads, qkv.dtype)
    kernel((batch, triple // 3 // kernel.constants["STEP"]), g.contiguous(), qkv, g_qkv, count)
    return g_qkv


_self_attention = FusedOp("self_attention", _self_forward, _self_gradients)


def _supports_self_attention(qkv: Tensor, num_heads: int, bias: Tensor | None = None) -> bool:
    if bias is not None or not dispatch.on_gpu(qkv) or qkv.ndim != 3:
        return False
    dim = qkv.shape[-1] // 3
    width = dim // num_heads
    widths = 16 <= width <= MAX_HEAD_DIM or (width in (4, 8) and dim % 16 == 0)
    return widths and qkv.shape[1] <= MAX_TOKENS and qkv.is_contiguous()


@register_op("self_attention", reference=self_attention_reference, supports=_supports_self_attention)
def self_attention(qkv: Tensor, num_heads: int, bias: Tensor | None = None) -> Tensor:
    return _self_attention(qkv, num_heads)


_add_flash(self_attention)


# Cross-attention of many queries to at most 128 keys.
#
# Flash attention walks over blocks of keys, stores a sum per query, and makes three passes in backward. Here all keys
# and values of a head stay in shared memory while a program walks over queries; every softmax is complete, so that
# backward needs nothing but the inputs and reads queries and gradients once.

MAX_KEYS = 128
KEY_TILES = (16, 64, MAX_KEYS)
PROGRAMS = (528, 256)  # in forward and backward: four per multiprocessor of an H200, and almost two


def cross_attention_reference(query: Tensor, key_value: Tensor, num_heads: int, scale: float | None = None) -> Tensor:
    """query (B, N, D), key_value (B, M, 2 D), keys then values -> mixed values (B, N, D).

    scale: factor of the scores, by default one over the root of a head's width.
    """
    query = query.unflatten(2, (num_heads, -1)).transpose(1, 2)  # (B, heads, N, D/heads)
    key, value = key_value.unflatten(2, (2, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, M, D/heads)
    # PaCa Eq. 1, VT Eq. 5: softmax over tokens (query @ key.T * scale) @ value
    return F.scaled_dot_product_attention(query, key, value, scale=scale).transpose(1, 2).flatten(2)


if HAS_TRITON:

    @triton.jit
    def _cross_keys(
        kv_ptr, image, head, keys,
        HEADS: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    ):  # fmt: skip
        """Keys and values of a head (K, C), zeros beyond them, the offsets of the keys, and the mask."""
        row, lane = tl.arange(0, K)[:, None], tl.arange(0, C)[None, :]
        offset = (image * keys + row) * (2 * HEADS * WIDTH) + head * WIDTH + lane
        mask = (row < keys) & (lane < WIDTH)
        key = tl.load(kv_ptr + offset, mask=mask, other=0.0)
        value = tl.load(kv_ptr + offset + HEADS * WIDTH, mask=mask, other=0.0)
        return key, value, offset, mask

    @triton.jit
    @no_type_check
    def _cross_powers(query, key, keys, K: tl.constexpr, SCALE: tl.constexpr):
        """Exponentials of the scores (Q, K), zeros beyond the keys, and one over their sums (Q, 1).

        Scaled after the maximum, so that scaling and subtraction are one multiply-add.
        """
        scores = tl.dot(query, tl.trans(key))
        scores = tl.where(tl.arange(0, K)[None, :] < keys, scores, float("-inf"))
        largest = (tl.max(scores, 1) * (SCALE * 1.4426950408889634))[:, None]
        powers = tl.exp2(scores * (SCALE * 1.4426950408889634) - largest)
        return powers, 1 / tl.sum(powers, 1)[:, None]

    @jit
    def _cross_forward_kernel(
        q_ptr, kv_ptr, mixed_ptr, queries, keys,
        HEADS: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr,
        Q: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    ):  # fmt: skip
        image, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
        key, value, _, _ = _cross_keys(kv_ptr, image, head, keys, HEADS, WIDTH, K, C)
        lane = tl.arange(0, C)[None, :]
        for first in range(tl.program_id(1) * Q, queries, tl.num_programs(1) * Q):
            row = first + tl.arange(0, Q)[:, None]
            offset = (image * queries + row) * (HEADS * WIDTH) + head * WIDTH + lane
            mask = (row < queries) & (lane < WIDTH)
            query = tl.load(q_ptr + offset, mask=mask, other=0.0)
            powers, inverse = _cross_powers(query, key, keys, K, SCALE)
            mixed = tl.dot(powers.to(value.dtype), value) * inverse
            tl.store(mixed_ptr + offset, mixed.to(mixed_ptr.dtype.element_ty), mask=mask)

    @jit
    @no_type_check
    def _cross_backward_kernel(
        g_ptr, q_ptr, kv_ptr, g_q_ptr, g_kv_ptr, queries, keys,
        HEADS: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr,
        Q: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    ):  # fmt: skip
        """Gradients of the queries, and partial ones of keys and values, g_kv (programs, B, M, 2 D), to be summed."""
        images = tl.num_programs(0) // HEADS
        image, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
        key, value, key_offset, key_mask = _cross_keys(kv_ptr, image, head, keys, HEADS, WIDTH, K, C)
        lane = tl.arange(0, C)[None, :]
        g_key = tl.zeros((K, C), tl.float32)
        g_value = tl.zeros((K, C), tl.float32)
        for first in range(tl.program_id(1) * Q, queries, tl.num_programs(1) * Q):
            row = first + tl.arange(0, Q)[:, None]
            offset = (image * queries + row) * (HEADS * WIDTH) + head * WIDTH + lane
            mask = (row < queries) & (lane < WIDTH)
            query = tl.load(q_ptr + offset, mask=mask, other=0.0)
            g = tl.load(g_ptr + offset, mask=mask, other=0.0)
            powers, inverse = _cross_powers(query, key, keys, K, SCALE)
            probabilities = powers * inverse
            g_value = tl.dot(tl.trans(probabilities.to(g.dtype)), g, g_value)
            g_scores = tl.dot(g, tl.trans(value))
            g_scores = probabilities * (g_scores - tl.sum(probabilities * g_scores, 1)[:, None])
            g_scores = g_scores.to(query.dtype)  # before they are scaled
            g_key = tl.dot(tl.trans(g_scores), query, g_key)
            g_query = tl.dot(g_scores, key) * SCALE
            tl.store(g_q_ptr + offset, g_query.to(g_q_ptr.dtype.element_ty), mask=mask)
        key_offset += tl.program_id(1).to(tl.int64) * images * keys * (2 * HEADS * WIDTH)
        dtype = g_kv_ptr.dtype.element_ty
        tl.store(g_kv_ptr + key_offset, (g_key * SCALE).to(dtype), mask=key_mask)
        tl.store(g_kv_ptr + key_offset + HEADS * WIDTH, g_value.to(dtype), mask=key_mask)


@variant
def _cross_kernel(backward: bool, heads: int, width: int, scale: float, keys: int) -> Kernel:
    tile = dict(Q=128, num_warps=8, num_stages=3) if backward else dict(Q=64, num_warps=4, num_stages=1)
    return Kernel(
        _cross_backward_kernel if backward else _cross_forward_kernel, HEADS=heads, WIDTH=width, SCALE=scale,
        K=keys, C=max(16, next_power_of_2(width)), **tile,
    )  # fmt: skip


def _cross_launch(backward: bool, query: Tensor, key_value: Tensor, num_heads: int, scale: float) -> tuple[int, Any]:
    """Number of programs that share the queries of a head, and the launch."""
    batch, queries, dim = query.shape
    keys = key_value.shape[1]
    kernel = _cross_kernel(backward, num_heads, dim // num_heads, scale, _tile(KEY_TILES, keys))
    programs = min(cdiv(queries, kernel.constants["Q"]), cdiv(PROGRAMS[backward], max(1, batch * num_heads)))
    return programs, lambda *tensors: kernel((batch * num_heads, programs), *tensors, queries, keys)


def _cross_forward(query: Tensor, key_value: Tensor, num_heads: int, scale: float) -> Tensor:
    query, key_value = query.contiguous(), key_value.contiguous()
    mixed = torch.empty_like(query)
    _cross_launch(False, query, key_value, num_heads, scale)[1](query, key_value, mixed)
    return mixed


def _cross_gradients(
    g: Tensor, query: Tensor, key_value: Tensor, num_heads: int, scale: float
) -> tuple[Tensor, Tensor]:
    g, query, key_value = g.contiguous(), query.contiguous(), key_value.contiguous()
    programs, launch = _cross_launch(True, query, key_value, num_heads, scale)
    g_query = torch.empty_like(query)
    if programs == 1:
        g_key_value = torch.empty_like(key_value)
        launch(g, query, key_value, g_query, g_key_value)
        return g_query, g_key_value
    partial = torch.empty(programs, *key_value.shape, dtype=torch.float32, device=query.device)
    launch(g, query, key_value, g_query, partial)
    return g_query, partial.sum(0).to(key_value.dtype)


_cross_attention = FusedOp("cross_attention", _cross_forward, _cross_gradients)


def _are_half_and_contiguous(first: Tensor, second: Tensor) -> bool:
    if not dispatch.on_gpu(first, second) or not dispatch.same_half_dtype(first, second):
        return False
    return first.is_contiguous() and second.is_contiguous()


def _supports_cross_attention(query: Tensor, key_value: Tensor, num_heads: int, scale: float | None = None) -> bool:
    if not _are_half_and_contiguous(query, key_value):
        return False
    return key_value.shape[1] <= MAX_KEYS and 16 <= query.shape[-1] // num_heads <= MAX_HEAD_DIM


@register_op("cross_attention", reference=cross_attention_reference, supports=_supports_cross_attention)
def cross_attention(query: Tensor, key_value: Tensor, num_heads: int, scale: float | None = None) -> Tensor:
    scale = (query.shape[-1] // num_heads) ** -0.5 if scale is None else scale
    return _cross_attention(query, key_value, num_heads, scale)


_add_flash(cross_attention)


# Attention in which at most 32 tokens are the queries: of at most 256 pixels, or of the tokens themselves.
#
# Flash attention takes 64 or 128 queries per program, mostly padding here. A program takes one head of one image: its
# queries, and all keys and values. Keys lie beside the values (pixels) or beside the queries (tokens), head by head, as
# one projection makes them, and so do the gradients.

MAX_QUERIES = 32
MAX_PIXELS = 256
PIXEL_TILES = ((16, 64), (16, MAX_PIXELS), (MAX_QUERIES, MAX_PIXELS))  # queries, keys
TOKEN_TILES = ((16, 16), (MAX_QUERIES, MAX_QUERIES))


def pixel_pooling_attention_reference(query: Tensor, key_value: Tensor, num_heads: int, scale: float) -> Tensor:
    """Tokens that attend to pixels: query (B, M, D), key_value (B, N, 2 D), head by head key, value -> (B, M, D)."""
    query = query.unflatten(2, (num_heads, -1)).transpose(1, 2)  # (B, heads, M, D/heads)
    key, value = key_value.unflatten(2, (num_heads, 2, -1)).transpose(1, 2).unbind(3)  # (B, heads, N, D/heads)
    # VT Eq. 2: softmax over pixels (query @ key.T * scale) @ value
    return F.scaled_dot_product_attention(query, key, value, scale=scale).transpose(1, 2).flatten(2)


def token_attention_reference(query_key: Tensor, value: Tensor, num_heads: int) -> Tensor:
    """Self-attention with narrow keys: query_key (B, M, E), head by head query, key; value (B, M, D) -> (B, M, D)."""
    query, key = query_key.unflatten(2, (num_heads, 2, -1)).transpose(1, 2).unbind(3)  # (B, heads, M, E/heads/2)
    value = value.unflatten(2, (num_heads, -1)).transpose(1, 2)  # (B, heads, M, D/heads)
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


if HAS_TRITON:

    @triton.jit
    def _head_tile(
        count, HEADS: tl.constexpr, STRIDE: tl.constexpr, SHIFT: tl.constexpr, WIDTH: tl.constexpr,
        ROWS: tl.constexpr, LANES: tl.constexpr,
    ):  # fmt: skip
        """Offsets of this program's head in (B, count, HEADS, STRIDE), from channel SHIFT on, and the mask."""
        image, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
        row, lane = tl.arange(0, ROWS)[:, None], tl.arange(0, LANES)[None, :]
        offset = ((image * count + row) * HEADS + head) * STRIDE + SHIFT + lane
        return offset, (row < count) & (lane < WIDTH)

    @triton.jit
    @no_type_check
    def _few_probabilities(key, query, keys, K: tl.constexpr, SCALE: tl.constexpr):
        """Softmax over the keys (K, Q): columns sum to one, rows beyond the keys are zero."""
        scores = tl.dot(key, tl.trans(query)) * (SCALE * 1.4426950408889634)
        scores = tl.where(tl.arange(0, K)[:, None] < keys, scores, float("-inf"))
        powers = tl.exp2(scores - tl.max(scores, 0)[None, :])
        return powers * (1 / tl.sum(powers, 0))[None, :]

    @jit
    @no_type_check
    def _few_forward_kernel(
        first_ptr, second_ptr, mixed_ptr, queries, keys,
        HEADS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, KEY_FIRST: tl.constexpr, SCALE: tl.constexpr,
        Q: tl.constexpr, K: tl.constexpr, C: tl.constexpr, V: tl.constexpr,
    ):  # fmt: skip
        """first: queries, with keys beside them if KEY_FIRST; second: values, otherwise with keys before them."""
        FIRST: tl.constexpr = 2 * WIDTH if KEY_FIRST else WIDTH
        SECOND: tl.constexpr = VALUES if KEY_FIRST else WIDTH + VALUES
        key_ptr = first_ptr if KEY_FIRST else second_ptr
        offset, mask = _head_tile(queries, HEADS, FIRST, 0, WIDTH, Q, C)
        query = tl.load(first_ptr + offset, mask=mask, other=0.0)
        offset, mask = _head_tile(keys, HEADS, FIRST if KEY_FIRST else SECOND, WIDTH if KEY_FIRST else 0, WIDTH, K, C)
        key = tl.load(key_ptr + offset, mask=mask, other=0.0)
        offset, mask = _head_tile(keys, HEADS, SECOND, 0 if KEY_FIRST else WIDTH, VALUES, K, V)
        value = tl.load(second_ptr + offset, mask=mask, other=0.0)
        probabilities = _few_probabilities(key, query, keys, K, SCALE)
        mixed = tl.dot(tl.trans(probabilities.to(value.dtype)), value)
        offset, mask = _head_tile(queries, HEADS, VALUES, 0, VALUES, Q, V)
        tl.store(mixed_ptr + offset, mixed.to(mixed_ptr.dtype.element_ty), mask=mask)

    @jit
    @no_type_check
    def _few_backward_kernel(
        g_ptr, first_ptr, second_ptr, g_first_ptr, g_second_ptr, queries, keys,
        HEADS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, KEY_FIRST: tl.constexpr, SCALE: tl.constexpr,
        Q: tl.constexpr, K: tl.constexpr, C: tl.constexpr, V: tl.constexpr,
    ):  # fmt: skip
        FIRST: tl.constexpr = 2 * WIDTH if KEY_FIRST else WIDTH
        SECOND: tl.constexpr = VALUES if KEY_FIRST else WIDTH + VALUES
        key_ptr = first_ptr if KEY_FIRST else second_ptr
        g_key_ptr = g_first_ptr if KEY_FIRST else g_second_ptr
        offset, mask = _head_tile(queries, HEADS, VALUES, 0, VALUES, Q, V)
        g = tl.load(g_ptr + offset, mask=mask, other=0.0)
        query_offset, query_mask = _head_tile(queries, HEADS, FIRST, 0, WIDTH, Q, C)
        query = tl.load(first_ptr + query_offset, mask=query_mask, other=0.0)
        key_offset, key_mask = _head_tile(
            keys, HEADS, FIRST if KEY_FIRST else SECOND, WIDTH if KEY_FIRST else 0, WIDTH, K, C
        )
        key = tl.load(key_ptr + key_offset, mask=key_mask, other=0.0)
        value_offset, value_mask = _head_tile(keys, HEADS, SECOND, 0 if KEY_FIRST else WIDTH, VALUES, K, V)
        value = tl.load(second_ptr + value_offset, mask=value_mask, other=0.0)
        probabilities = _few_probabilities(key, query, keys, K, SCALE)
        dtype = g_first_ptr.dtype.element_ty
        g_value = tl.dot(probabilities.to(g.dtype), g)
        tl.store(g_second_ptr + value_offset, g_value.to(dtype), mask=value_mask)
        g_scores = tl.dot(value, tl.trans(g))  # (K, Q)
        g_scores = probabilities * (g_scores - tl.sum(probabilities * g_scores, 0)[None, :]) * SCALE
        g_scores = g_scores.to(query.dtype)
        tl.store(g_key_ptr + key_offset, tl.dot(g_scores, query).to(dtype), mask=key_mask)
        tl.store(g_first_ptr + query_offset, tl.dot(tl.trans(g_scores), key).to(dtype), mask=query_mask)


@variant
def _few_kernel(
    backward: bool, heads: int, widths: tuple[int, int], key_first: bool, scale: float, tile: tuple[int, int]
) -> Kernel:
    """widths: of a head's keys and values."""
    options: dict[str, int] = dict(maxnreg=128) if tile[1] == MAX_PIXELS else {}  # two programs per multiprocessor
    return Kernel(
        _few_backward_kernel if backward else _few_forward_kernel, HEADS=heads, WIDTH=widths[0], VALUES=widths[1],
        KEY_FIRST=key_first, SCALE=scale, Q=tile[0], K=tile[1], C=max(16, next_power_of_2(widths[0])),
        V=max(16, next_power_of_2(widths[1])), num_warps=min(8, max(1, tile[1] // 32)), **options,
    )  # fmt: skip


def _few_launch(
    backward: bool, first: Tensor, second: Tensor, num_heads: int, scale: float, key_first: bool, *tensors: Tensor
) -> None:
    """Launch a kernel over `tensors`; first, second and key_first as in `_few_forward_kernel`."""
    width = int(first.shape[2] // num_heads // (2 if key_first else 1))
    values = int(second.shape[2] // num_heads) - (0 if key_first else width)
    queries, keys = first.shape[1], second.shape[1]
    tiles = TOKEN_TILES if key_first else PIXEL_TILES
    tile = next(tile for tile in tiles if queries <= tile[0] and keys <= tile[1])
    kernel = _few_kernel(backward, int(num_heads), (width, values), key_first, scale, tile)
    kernel((first.shape[0] * num_heads,), *tensors, queries, keys)


def _few_forward(first: Tensor, second: Tensor, num_heads: int, scale: float, key_first: bool) -> Tensor:
    first, second = first.contiguous(), second.contiguous()
    mixed = torch.empty_like(second if key_first else first)
    _few_launch(False, first, second, num_heads, scale, key_first, first, second, mixed)
    return mixed


def _few_gradients(
    g: Tensor, first: Tensor, second: Tensor, num_heads: int, scale: float, key_first: bool
) -> tuple[Tensor, Tensor]:
    first, second = first.contiguous(), second.contiguous()
    g_first, g_second = torch.empty_like(first), torch.empty_like(second)
    tensors = g.contiguous(), first, second, g_first, g_second
    _few_launch(True, first, second, num_heads, scale, key_first, *tensors)
    return g_first, g_second


_few_attention = FusedOp("attention_of_few", _few_forward, _few_gradients)


def _supports_pixel_pooling(query: Tensor, key_value: Tensor, num_heads: int, scale: float) -> bool:
    if not _are_half_and_contiguous(query, key_value) or not 16 <= query.shape[2] // num_heads <= MAX_HEAD_DIM:
        return False
    return query.shape[1] <= MAX_QUERIES and key_value.shape[1] <= MAX_PIXELS


@register_op("pixel_pooling_attention", reference=pixel_pooling_attention_reference, supports=_supports_pixel_pooling)
def pixel_pooling_attention(query: Tensor, key_value: Tensor, num_heads: int, scale: float) -> Tensor:
    return _few_attention(query, key_value, num_heads, scale, False)


_add_flash(pixel_pooling_attention)


def _supports_token_attention(query_key: Tensor, value: Tensor, num_heads: int) -> bool:
    if not _are_half_and_contiguous(query_key, value) or value.shape[1] > MAX_QUERIES:
        return False
    widths = query_key.shape[2] // num_heads // 2, value.shape[2] // num_heads
    return all(16 <= width <= MAX_HEAD_DIM for width in widths)


@register_op("token_attention", reference=token_attention_reference, supports=_supports_token_attention)
def token_attention(query_key: Tensor, value: Tensor, num_heads: int) -> Tensor:
    scale = int(query_key.shape[2] // num_heads // 2) ** -0.5
    return _few_attention(query_key, value, num_heads, scale, True)


_add_flash(token_attention)
