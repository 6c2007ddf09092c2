"""Attention of many queries to at most 128 keys, straight from the projections to the mixed values.

The library's kernels walk over keys in blocks, keep a sum for every query beside the answer, and on the way back make
three passes of their own over queries and gradients. A hundred clusters are one block: here a program keeps all keys
and values of a head on the chip and walks over the queries. Every softmax is whole at once, so that the way back needs
nothing but the inputs, and reads queries and gradients once. Nothing is copied before or behind it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels import HALVES, HAS_TRITON, learns
from saccade.kernels.known import describe
from saccade.kernels.launch import Launch, planned
from saccade.kernels.sizes import parts, power_of_2

MOST = 128  # keys
WIDEST = 64  # channels of a head
PROGRAMS = (528, 256)  # there and back: four for every multiprocessor of an H200, and almost two


def are_few(query: Tensor, key_value: Tensor, num_heads: int) -> bool:
    """Whether the keys are few, the heads of at most 64 channels, and all in half precision, in one piece."""
    width = query.shape[-1] // num_heads
    half = query.dtype == key_value.dtype and query.dtype in HALVES
    fits = key_value.shape[1] <= MOST and 16 <= width <= WIDEST
    return half and fits and query.is_contiguous() and key_value.is_contiguous()


def few_keys_twin(query: Tensor, key_value: Tensor, num_heads: int, scale: float | None = None) -> Tensor:
    """The same by the library, for any number of keys."""
    query = query.unflatten(2, (num_heads, -1)).transpose(1, 2)  # (B, heads, N, D/heads)
    key, value = key_value.unflatten(2, (2, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, M, D/heads)
    return F.scaled_dot_product_attention(query, key, value, scale=scale).transpose(1, 2).flatten(2)


if HAS_TRITON:
    import triton
    import triton.language as tl
    from torch.library import custom_op

    @triton.jit
    def _keys(kv_pointer, image, head, dim, KEYS: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, C: tl.constexpr):
        """Keys and values of a head (K, C), zeros beyond them; where the keys lie, and which of them there are."""
        row, lane = tl.arange(0, K)[:, None], tl.arange(0, C)[None, :]
        at = (image * KEYS + row) * 2 * dim + head * WIDTH + lane
        known = (row < KEYS) & (lane < WIDTH)
        return (
            tl.load(kv_pointer + at, mask=known, other=0.0),
            tl.load(kv_pointer + at + dim, mask=known, other=0.0),
            at,
            known,
        )

    @triton.jit
    def _weights(query, key, steepness, KEYS: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):
        """Powers of the scores (Q, K), zeros beyond the keys, and one over their sums (Q, 1).

        KEYS is a constant so that most columns need no comparison; scaled last, a score and its row's largest are one
        multiplication and sum.
        """
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        scores = tl.where(tl.arange(0, K)[None, :] < KEYS, scores, float("-inf"))
        largest = (tl.max(scores, 1) * steepness)[:, None]
        powers = tl.exp2(scores * steepness - largest)
        return powers, 1 / tl.sum(powers, 1)[:, None]

    @triton.jit
    def _forward_kernel(
        q_pointer, kv_pointer, y_pointer, queries, dim, heads, steepness,
        KEYS: tl.constexpr, WIDTH: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
        PRECISION: tl.constexpr,
    ):  # fmt: skip
        """steepness: what the scores are multiplied with before they become powers of two."""
        image, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
        key, value, _, _ = _keys(kv_pointer, image, head, dim, KEYS, WIDTH, K, C)
        lane = tl.arange(0, C)[None, :]
        for first in range(tl.program_id(1) * Q, queries, tl.num_programs(1) * Q):
            row = first + tl.arange(0, Q)[:, None]
            at = (image * queries + row) * dim + head * WIDTH + lane
            known = (row < queries) & (lane < WIDTH)
            query = tl.load(q_pointer + at, mask=known, other=0.0)
            powers, share = _weights(query, key, steepness, KEYS, K, PRECISION)
            mixed = tl.dot(powers.to(value.dtype), value, input_precision=PRECISION) * share
            tl.store(y_pointer + at, mixed.to(y_pointer.dtype.element_ty), mask=known)

    @triton.jit
    def _backward_kernel(
        g_pointer, q_pointer, kv_pointer, dq_pointer, dkv_pointer, queries, dim, heads, steepness, scale,
        KEYS: tl.constexpr, WIDTH: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
        PRECISION: tl.constexpr,
    ):  # fmt: skip
        """Gradients of the queries, and partial ones of keys and values: dkv (parts, B, M, 2 D), summed outside."""
        images = tl.num_programs(0) // heads
        image, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
        key, value, place, held = _keys(kv_pointer, image, head, dim, KEYS, WIDTH, K, C)
        lane = tl.arange(0, C)[None, :]
        to_key = tl.zeros((K, C), tl.float32)
        to_value = tl.zeros((K, C), tl.float32)
        for first in range(tl.program_id(1) * Q, queries, tl.num_programs(1) * Q):
            row = first + tl.arange(0, Q)[:, None]
            at = (image * queries + row) * dim + head * WIDTH + lane
            known = (row < queries) & (lane < WIDTH)
            query = tl.load(q_pointer + at, mask=known, other=0.0)
            g = tl.load(g_pointer + at, mask=known, other=0.0)
            powers, share = _weights(query, key, steepness, KEYS, K, PRECISION)
            weights = powers * share
            to_value = tl.dot(tl.trans(weights.to(g.dtype)), g, to_value, input_precision=PRECISION)
            to_weights = tl.dot(g, tl.trans(value), input_precision=PRECISION)
            level = tl.sum(weights * to_weights, 1)[:, None]
            to_scores = (weights * (to_weights - level)).to(query.dtype)  # before they are scaled
            to_key = tl.dot(tl.trans(to_scores), query, to_key, input_precision=PRECISION)
            to_query = tl.dot(to_scores, key, input_precision=PRECISION) * scale
            tl.store(dq_pointer + at, to_query.to(dq_pointer.dtype.element_ty), mask=known)
        place += tl.program_id(1).to(tl.int64) * images * KEYS * 2 * dim
        tl.store(dkv_pointer + place, (to_key * scale).to(dkv_pointer.dtype.element_ty), mask=held)
        tl.store(dkv_pointer + place + dim, to_value.to(dkv_pointer.dtype.element_ty), mask=held)

    def _tile(keys: int, width: int, back: bool) -> dict[str, int]:
        """Queries at once, keys, channels, threads: a group of four warps carries 64 queries."""
        tall, wide = max(16, power_of_2(keys)), max(16, power_of_2(width))
        return dict(Q=128 if back else 64, K=tall, C=wide, num_warps=8 if back else 4, num_stages=3 if back else 1)

    @planned
    def _asking(
        back: bool, batch: int, queries: int, keys: int, dim: int, heads: int, scale: float, exact: bool
    ) -> tuple[int, Launch]:
        """Programs that share the queries of a head, and their launch."""
        width = dim // heads
        tile = _tile(keys, width, back)
        blocks = parts(queries, tile["Q"])
        wanted = parts(PROGRAMS[back], batch * heads)
        share = min(blocks, wanted)
        numbers = (queries, dim, heads, scale * 1.4426950408889634, *((scale,) if back else ()))
        constants = dict(KEYS=keys, WIDTH=width, PRECISION="ieee" if exact else "tf32") | tile
        kernel = _backward_kernel if back else _forward_kernel
        return share, Launch(kernel, (batch * heads, share), *numbers, **constants)

    def _ask(query: Tensor, key_value: Tensor, num_heads: int, scale: float) -> Tensor:
        query, key_value = query.contiguous(), key_value.contiguous()
        batch, queries, dim = query.shape
        exact = query.dtype == torch.float32
        _, start = _asking(False, batch, queries, key_value.shape[1], dim, num_heads, scale, exact)
        mixed = torch.empty_like(query)
        start(query, key_value, mixed)
        return mixed

    def _ask_gradients(
        g: Tensor, query: Tensor, key_value: Tensor, num_heads: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        g, query, key_value = g.contiguous(), query.contiguous(), key_value.contiguous()
        batch, queries, dim = query.shape
        exact = query.dtype == torch.float32
        share, start = _asking(True, batch, queries, key_value.shape[1], dim, num_heads, scale, exact)
        to_query = torch.empty_like(query)
        if share == 1:
            to_key_value = torch.empty_like(key_value)
            start(g, query, key_value, to_query, to_key_value)
            return to_query, to_key_value
        partial = torch.empty(share, *key_value.shape, dtype=torch.float32, device=query.device)
        start(g, query, key_value, to_query, partial)
        return to_query, partial.sum(0).to(key_value.dtype)

    class _FewKeys(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query: Tensor, key_value: Tensor, num_heads: int, scale: float) -> Tensor:
            _save(ctx, (query, key_value, num_heads, scale), None)
            return _ask(query, key_value, num_heads, scale)

        @staticmethod
        def backward(ctx, g: Tensor):
            return *_ask_gradients(g, *ctx.saved_tensors, *ctx.numbers), None, None

    _op = custom_op("saccade::few_keys", _ask, mutates_args=())
    _gradients_op = custom_op("saccade::few_keys_backward", _ask_gradients, mutates_args=())

    describe(_op, lambda query, *_: query.new_empty(query.shape))
    describe(_gradients_op, lambda g, *inputs: tuple(x.new_empty(x.shape) for x in inputs[:2]))

    def _save(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.numbers = inputs[2:]

    def _backward(ctx, g: Tensor):
        return *_gradients_op(g, *ctx.saved_tensors, *ctx.numbers), None, None

    _op.register_autograd(_backward, setup_context=_save)


def few_keys(query: Tensor, key_value: Tensor, num_heads: int, scale: float | None = None) -> Tensor:
    """query (B, N, D), key_value (B, M, 2 D): keys, then values, head by head -> mixed values (B, N, D).

    The scores are multiplied with `scale`: one over the root of a head's width, unless said otherwise.
    """
    scale = (query.shape[-1] // num_heads) ** -0.5 if scale is None else scale
    if torch.compiler.is_compiling():
        return _op(query, key_value, num_heads, scale)
    if learns(query, key_value):
        return _FewKeys.apply(query, key_value, num_heads, scale)
    return _ask(query, key_value, num_heads, scale)
