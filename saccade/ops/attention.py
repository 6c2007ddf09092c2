"""Multi-head attention with few tokens on one side."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.ops import _dispatch as dispatch
from saccade.ops._dispatch import FusedOp, register_op
from saccade.ops._launch import HAS_TRITON, Kernel, next_power_of_2, variant

if HAS_TRITON:
    import triton
    import triton.language as tl

    from saccade.ops._launch import jit

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
    def _self_probabilities(query, key, own, key_mask, SCALE: tl.constexpr, PRECISION: tl.constexpr):
        """Softmax over the keys of one head (M, M); channels of other heads count as zero."""
        scores = tl.dot(tl.where(own, query, 0.0).to(key.dtype), tl.trans(key), input_precision=PRECISION) * SCALE
        scores = tl.where(key_mask, scores, float("-inf"))
        scores = tl.exp(scores - tl.max(scores, 1)[:, None])
        return scores / tl.sum(scores, 1)[:, None]

    @jit
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


@variant
def _self_kernel(backward: bool, dim: int, num_heads: int, dtype: torch.dtype) -> Kernel:
    width = dim // num_heads
    step = max(16, width)  # channels of a program: several small heads, or one
    channels = next_power_of_2(step)
    # The scores are held in registers: backward spills with fewer warps than these (ptxas, sm_90a).
    warps = MAX_TOKENS // 16 * (2 if channels == MAX_HEAD_DIM else 1)
    return Kernel(
        _self_backward_kernel if backward else _self_forward_kernel, DIM=dim, SCALE=width**-0.5, ROWS=MAX_TOKENS,
        CHANNELS=channels, STEP=step, WIDTH=width, PRECISION="ieee" if dtype == torch.float32 else "tf32",
        num_warps=warps,
    )  # fmt: skip


def _self_forward(qkv: Tensor, num_heads: int) -> Tensor:
    batch, count, triple = qkv.shape
    mixed = torch.empty(batch, count, triple // 3, dtype=qkv.dtype, device=qkv.device)
    kernel = _self_kernel(False, triple // 3, num_heads, qkv.dtype)
    kernel((batch, triple // 3 // kernel.constants["STEP"]), qkv.contiguous(), mixed, count)
    return mixed


def _self_gradients(g: Tensor, qkv: Tensor, num_heads: int) -> Tensor:
    batch, count, triple = qkv.shape
    qkv = qkv.contiguous()
    g_qkv = torch.empty_like(qkv)
    kernel = _self_kernel(True, triple // 3, num_heads, qkv.dtype)
    kernel((batch, triple // 3 // kernel.constants["STEP"]), g.contiguous(), qkv, g_qkv, count)
    return g_qkv


def _self_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    qkv, ctx.num_heads = inputs
    ctx.save_for_backward(qkv)


def _self_backward(ctx: Any, gradients: Any, g: Tensor) -> tuple[Tensor, None]:
    (qkv,) = ctx.saved_tensors
    return gradients(g, qkv, ctx.num_heads), None


_self_attention = FusedOp("self_attention", _self_forward, _self_gradients, _self_setup, _self_backward)


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
