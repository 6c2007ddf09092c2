"""Attention in which a few tokens ask: pixels, or one another.

The library's kernels take 64 or 128 queries at once, of which there are 8 or 16 here, and on the way back they make
three passes, two of which see mostly padding. Their gradients of keys and values come apart, though both were made by
one product, head by head beside each other. Here a program takes one head of one image: its queries, and all keys and
values at once, of at most 256 vectors. Every softmax is whole, the way back needs nothing but the inputs, and gradients
are written where the projection's own gradient wants them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels import HALVES, HAS_TRITON, learns
from saccade.kernels.known import describe
from saccade.kernels.launch import Launch, planned
from saccade.kernels.sizes import power_of_2

ASKING = 32  # tokens that ask, at most
ASKED = 256  # vectors that are asked, at most
WIDEST = 64  # channels of a head


def is_small(asking: int, asked: int, *widths: int) -> bool:
    """Whether a head fits into one program."""
    return asking <= ASKING and asked <= ASKED and all(16 <= width <= WIDEST for width in widths)


def fit(*tensors: Tensor) -> bool:
    """Whether these are all of one half type, in one piece."""
    first = tensors[0].dtype
    return first in HALVES and all(tensor.dtype == first and tensor.is_contiguous() for tensor in tensors)


def ask_pixels_twin(query: Tensor, key_value: Tensor, num_heads: int, scale: float) -> Tensor:
    """The same by the library, for any number of queries and pixels."""
    query = query.unflatten(2, (num_heads, -1)).transpose(1, 2)  # (B, heads, M, D/heads)
    key, value = key_value.unflatten(2, (num_heads, 2, -1)).transpose(1, 2).unbind(3)  # (B, heads, N, D/heads)
    return F.scaled_dot_product_attention(query, key, value, scale=scale).transpose(1, 2).flatten(2)


def ask_each_other_twin(query_key: Tensor, value: Tensor, num_heads: int) -> Tensor:
    """The same by the library, for any number of tokens."""
    query, key = query_key.unflatten(2, (num_heads, 2, -1)).transpose(1, 2).unbind(3)
    value = value.unflatten(2, (num_heads, -1)).transpose(1, 2)  # (B, heads, M, D/heads)
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


if HAS_TRITON:
    import triton
    import triton.language as tl
    from torch.library import custom_op

    @triton.jit
    def _vectors(count, heads, ROW: tl.constexpr, HEAD: tl.constexpr, AT: tl.constexpr, ROWS: tl.constexpr,
                 WIDTH: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
        """Where a head's vectors of this program's image lie (ROWS, WIDE), and which of them there are.

        ROW and HEAD are the steps from vector to vector and from head to head, AT is where the first one starts.
        """
        image, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
        row, lane = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDE)[None, :]
        return (image * count + row) * ROW + head * HEAD + AT + lane, (row < count) & (lane < WIDTH)

    @triton.jit
    def _weights(key, query, keys, steepness, K: tl.constexpr, PRECISION: tl.constexpr):
        """Softmax over the keys (K, Q): its columns sum to one, rows beyond the keys are zero."""
        scores = tl.dot(key, tl.trans(query), input_precision=PRECISION) * steepness
        scores = tl.where(tl.arange(0, K)[:, None] < keys, scores, float("-inf"))
        powers = tl.exp2(scores - tl.max(scores, 0)[None, :])
        return powers * (1 / tl.sum(powers, 0))[None, :]

    @triton.jit
    def _forward_kernel(
        q_pointer, k_pointer, v_pointer, y_pointer, queries, keys, heads, steepness,
        Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr, K_AT: tl.constexpr,
        V_ROW: tl.constexpr, V_HEAD: tl.constexpr, V_AT: tl.constexpr, Y_ROW: tl.constexpr,
        WIDTH: tl.constexpr, VALUES: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, C: tl.constexpr, V: tl.constexpr,
        PRECISION: tl.constexpr,
    ):  # fmt: skip
        """steepness: what the scores are multiplied with before they become powers of two."""
        at, known = _vectors(queries, heads, Q_ROW, Q_HEAD, 0, Q, WIDTH, C)
        query = tl.load(q_pointer + at, mask=known, other=0.0)
        at, known = _vectors(keys, heads, K_ROW, K_HEAD, K_AT, K, WIDTH, C)
        key = tl.load(k_pointer + at, mask=known, other=0.0)
        at, known = _vectors(keys, heads, V_ROW, V_HEAD, V_AT, K, VALUES, V)
        value = tl.load(v_pointer + at, mask=known, other=0.0)
        weights = _weights(key, query, keys, steepness, K, PRECISION)
        mixed = tl.dot(tl.trans(weights.to(value.dtype)), value, input_precision=PRECISION)
        at, known = _vectors(queries, heads, Y_ROW, VALUES, 0, Q, VALUES, V)
        tl.store(y_pointer + at, mixed.to(y_pointer.dtype.element_ty), mask=known)

    @triton.jit
    def _backward_kernel(
        g_pointer, q_pointer, k_pointer, v_pointer, dq_pointer, dk_pointer, dv_pointer, queries, keys, heads, steepness,
        scale,
        Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr, K_AT: tl.constexpr,
        V_ROW: tl.constexpr, V_HEAD: tl.constexpr, V_AT: tl.constexpr, Y_ROW: tl.constexpr,
        WIDTH: tl.constexpr, VALUES: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, C: tl.constexpr, V: tl.constexpr,
        PRECISION: tl.constexpr,
    ):  # fmt: skip
        """Gradients of queries, keys and values, each where its own lies."""
        at, known = _vectors(queries, heads, Y_ROW, VALUES, 0, Q, VALUES, V)
        g = tl.load(g_pointer + at, mask=known, other=0.0)
        q_at, asking = _vectors(queries, heads, Q_ROW, Q_HEAD, 0, Q, WIDTH, C)
        query = tl.load(q_pointer + q_at, mask=asking, other=0.0)
        k_at, asked = _vectors(keys, heads, K_ROW, K_HEAD, K_AT, K, WIDTH, C)
        key = tl.load(k_pointer + k_at, mask=asked, other=0.0)
        v_at, held = _vectors(keys, heads, V_ROW, V_HEAD, V_AT, K, VALUES, V)
        value = tl.load(v_pointer + v_at, mask=held, other=0.0)
        weights = _weights(key, query, keys, steepness, K, PRECISION)
        to_value = tl.dot(weights.to(g.dtype), g, input_precision=PRECISION)
        tl.store(dv_pointer + v_at, to_value.to(dv_pointer.dtype.element_ty), mask=held)
        to_weights = tl.dot(value, tl.trans(g), input_precision=PRECISION)  # (K, Q)
        level = tl.sum(weights * to_weights, 0)[None, :]
        to_scores = (weights * (to_weights - level) * scale).to(query.dtype)
        to_key = tl.dot(to_scores, query, input_precision=PRECISION)
        tl.store(dk_pointer + k_at, to_key.to(dk_pointer.dtype.element_ty), mask=asked)
        to_query = tl.dot(tl.trans(to_scores), key, input_precision=PRECISION)
        tl.store(dq_pointer + q_at, to_query.to(dq_pointer.dtype.element_ty), mask=asking)

    def _warps(keys: int) -> int:
        """Threads for that many keys, a power of two."""
        return min(8, max(1, keys // 32))

    @planned
    def _asking(
        back: bool, batch: int, queries: int, keys: int, heads: int, widths: tuple[int, int], steps: tuple[int, ...],
        scale: float, exact: bool,
    ) -> Launch:  # fmt: skip
        """widths of a head's keys and values; steps: as the kernels' constants, in that order."""
        names = "Q_ROW", "Q_HEAD", "K_ROW", "K_HEAD", "K_AT", "V_ROW", "V_HEAD", "V_AT", "Y_ROW"
        tall, wide, far = (max(16, power_of_2(number)) for number in (queries, *widths))
        many = max(16, power_of_2(keys))
        tile = dict(WIDTH=widths[0], VALUES=widths[1], Q=tall, K=many, C=wide, V=far, num_warps=_warps(many))
        constants = dict(zip(names, steps, strict=True)) | tile | dict(PRECISION="ieee" if exact else "tf32")
        if many == ASKED and not exact:
            constants["maxnreg"] = 128  # two programs to a multiprocessor
        numbers = (queries, keys, heads, scale * 1.4426950408889634, *((scale,) if back else ()))
        return Launch(_backward_kernel if back else _forward_kernel, (batch * heads,), *numbers, **constants)

    def _pixels(back: bool, query: Tensor, key_value: Tensor, heads: int, scale: float) -> Launch:
        """Queries by themselves; keys and values beside each other, head by head."""
        batch, queries, dim = query.shape
        width = dim // heads
        steps = (dim, width, 2 * dim, 2 * width, 0, 2 * dim, 2 * width, width, dim)
        exact = query.dtype == torch.float32
        return _asking(back, batch, queries, key_value.shape[1], heads, (width, width), steps, scale, exact)

    def _tokens(back: bool, query_key: Tensor, value: Tensor, heads: int) -> Launch:
        """Queries and keys beside each other, head by head; values by themselves."""
        batch, count, dim = value.shape
        both, far = query_key.shape[2], dim // heads
        width = both // heads // 2
        steps = (both, 2 * width, both, 2 * width, width, dim, far, 0, dim)
        exact = value.dtype == torch.float32
        return _asking(back, batch, count, count, heads, (width, far), steps, width**-0.5, exact)

    def _ask_pixels(query: Tensor, key_value: Tensor, num_heads: int, scale: float) -> Tensor:
        query, key_value = query.contiguous(), key_value.contiguous()
        mixed = torch.empty_like(query)
        _pixels(False, query, key_value, num_heads, scale)(query, key_value, key_value, mixed)
        return mixed

    def _ask_pixels_gradients(
        g: Tensor, query: Tensor, key_value: Tensor, num_heads: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        g, query, key_value = g.contiguous(), query.contiguous(), key_value.contiguous()
        to_query, to_both = torch.empty_like(query), torch.empty_like(key_value)
        start = _pixels(True, query, key_value, num_heads, scale)
        start(g, query, key_value, key_value, to_query, to_both, to_both)
        return to_query, to_both

    def _ask_each_other(query_key: Tensor, value: Tensor, num_heads: int) -> Tensor:
        query_key, value = query_key.contiguous(), value.contiguous()
        mixed = torch.empty_like(value)
        _tokens(False, query_key, value, num_heads)(query_key, query_key, value, mixed)
        return mixed

    def _ask_each_other_gradients(g: Tensor, query_key: Tensor, value: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
        g, query_key, value = g.contiguous(), query_key.contiguous(), value.contiguous()
        to_both, to_value = torch.empty_like(query_key), torch.empty_like(value)
        start = _tokens(True, query_key, value, num_heads)
        start(g, query_key, query_key, value, to_both, to_both, to_value)
        return to_both, to_value

    class _AskPixels(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query: Tensor, key_value: Tensor, num_heads: int, scale: float) -> Tensor:
            _save(ctx, (query, key_value, num_heads, scale), None)
            return _ask_pixels(query, key_value, num_heads, scale)

        @staticmethod
        def backward(ctx, g: Tensor):
            return *_ask_pixels_gradients(g, *ctx.saved_tensors, *ctx.numbers), None, None

    class _AskEachOther(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query_key: Tensor, value: Tensor, num_heads: int) -> Tensor:
            _save(ctx, (query_key, value, num_heads), None)
            return _ask_each_other(query_key, value, num_heads)

        @staticmethod
        def backward(ctx, g: Tensor):
            return *_ask_each_other_gradients(g, *ctx.saved_tensors, *ctx.numbers), None

    _pixels_op = custom_op("saccade::ask_pixels", _ask_pixels, mutates_args=())
    _pixels_gradients_op = custom_op("saccade::ask_pixels_backward", _ask_pixels_gradients, mutates_args=())
    _tokens_op = custom_op("saccade::ask_each_other", _ask_each_other, mutates_args=())
    _tokens_gradients_op = custom_op("saccade::ask_each_other_backward", _ask_each_other_gradients, mutates_args=())

    describe(_pixels_op, lambda query, *_: query.new_empty(query.shape))
    describe(_tokens_op, lambda _, value, num_heads: value.new_empty(value.shape))
    for _op in (_pixels_gradients_op, _tokens_gradients_op):
        describe(_op, lambda g, *inputs: tuple(x.new_empty(x.shape) for x in inputs[:2]))

    def _save(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.numbers = inputs[2:]

    def _pixels_backward(ctx, g: Tensor):
        return *_pixels_gradients_op(g, *ctx.saved_tensors, *ctx.numbers), None, None

    def _tokens_backward(ctx, g: Tensor):
        return *_tokens_gradients_op(g, *ctx.saved_tensors, *ctx.numbers), None

    _pixels_op.register_autograd(_pixels_backward, setup_context=_save)
    _tokens_op.register_autograd(_tokens_backward, setup_context=_save)


def ask_pixels(query: Tensor, key_value: Tensor, num_heads: int, scale: float) -> Tensor:
    """query (B, M, D), key_value (B, N, 2 D): head by head key, value -> mixed values (B, M, D)."""
    if torch.compiler.is_compiling():
        return _pixels_op(query, key_value, num_heads, scale)
    if learns(query, key_value):
        return _AskPixels.apply(query, key_value, num_heads, scale)
    return _ask_pixels(query, key_value, num_heads, scale)


def ask_each_other(query_key: Tensor, value: Tensor, num_heads: int) -> Tensor:
    """query_key (B, M, E): head by head query, key; value (B, M, D) -> mixed values (B, M, D)."""
    if torch.compiler.is_compiling():
        return _tokens_op(query_key, value, num_heads)
    if learns(query_key, value):
        return _AskEachOther.apply(query_key, value, num_heads)
    return _ask_each_other(query_key, value, num_heads)
