"""Multi-head attention: a list of vectors among themselves, or one list asking another."""

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from saccade.kernels import allowed, enabled, suits, token_attention
from saccade.kernels.few_keys import are_few, few_keys, few_keys_twin
from saccade.kernels.short_attention import is_short, plain_attention, short_attention
from saccade.layers.linear import Linear


class SelfAttention(nn.Module):
    """Every vector asks all the others; one fused projection, one fused attention.

    `sub_norm` normalises what the heads found before the last projection (Sub-LN, arXiv 2210.06423).
    """

    def __init__(self, dim: int, num_heads: int, sub_norm: bool = False):
        super().__init__()
        check_heads(dim, num_heads)
        self.num_heads = num_heads
        self.qkv = Linear(dim, 3 * dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6) if sub_norm else nn.Identity()
        self.proj = Linear(dim, dim)

    def forward(self, tokens: Tensor, bias: Tensor | None = None) -> Tensor:
        """tokens (B, M, D), optional bias (heads, M, M) added to the scores -> tokens (B, M, D)."""
        return self.proj(self.norm(attend(self.qkv(tokens), self.num_heads, bias)))


class CrossAttention(nn.Module):
    """Every pixel asks a few tokens: cost N x M instead of N x N. `sub_norm` as in `SelfAttention`."""

    def __init__(self, dim: int, num_heads: int, sub_norm: bool = False):
        super().__init__()
        check_heads(dim, num_heads)
        self.num_heads = num_heads
        self.to_query = Linear(dim, dim)
        self.to_key_value = Linear(dim, 2 * dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6) if sub_norm else nn.Identity()
        self.proj = Linear(dim, dim)

    def forward(self, pixels: Tensor, tokens: Tensor) -> Tensor:
        """pixels (B, N, D), tokens (B, M, D) -> what every pixel found (B, N, D)."""
        return self.proj(self.norm(ask(self.to_query(pixels), self.to_key_value(tokens), self.num_heads)))


def check_heads(dim: int, num_heads: int) -> None:
    if dim % num_heads:
        raise ValueError(f"width {dim} does not divide into {num_heads} heads; choose heads that divide it.")


def ask(query: Tensor, key_value: Tensor, num_heads: int, scale: float | None = None) -> Tensor:
    """query (B, N, D), key_value (B, M, 2 D): keys, then values -> mixed values (B, N, D)."""
    if not torch.jit.is_scripting():  # noqa: SIM102 (TorchScript skips the branch only when it stands alone)
        if suits(query, key_value) and allowed("few_keys") and are_few(query, key_value, num_heads):
            return few_keys(query, key_value, num_heads, scale)
    return few_keys_twin(query, key_value, num_heads, scale)


def tokens_ask(asking: int, asked: int, widths: tuple[int, ...], *projections: Tensor) -> bool:
    """Whether that many tokens may ask that many vectors by the kernel: few of both, with heads of these widths.

    The projections must lie in one piece, in half precision on a GPU.
    """
    if not suits(*projections) or not allowed("token_attention"):
        return False
    return token_attention.is_small(asking, asked, *widths) and token_attention.fit(*projections)


def attend(qkv: Tensor, num_heads: int, bias: Tensor | None = None) -> Tensor:
    """qkv (B, M, 3 D), optional bias (heads, M, M) added to the scores -> mixed values (B, M, D)."""
    if not torch.jit.is_scripting():  # noqa: SIM102 (TorchScript skips the branch only when it stands alone)
        if bias is None and suits(qkv) and allowed("short_attention") and is_short(qkv, num_heads):
            return short_attention(qkv, num_heads)
    return plain_attention(qkv, num_heads, bias)


def in_sight() -> AbstractContextManager[None]:
    """A context in which attention is PyTorch's own, whose calls can be watched from outside."""
    return enabled(False)
