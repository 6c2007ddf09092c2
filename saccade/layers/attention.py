"""Multi-head attention among tokens, and from pixels to tokens."""

from torch import Tensor, nn

from saccade.layers.linear import Linear
from saccade.ops.attention import cross_attention, self_attention


class SelfAttention(nn.Module):
    """Multi-head self-attention. `sub_norm` adds a norm before the last projection (Sub-LN, arXiv 2210.06423)."""

    def __init__(self, dim: int, num_heads: int, sub_norm: bool = False):
        super().__init__()
        check_heads(dim, num_heads)
        self.num_heads = num_heads
        self.qkv = Linear(dim, 3 * dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6) if sub_norm else nn.Identity()
        self.proj = Linear(dim, dim)

    def forward(self, tokens: Tensor, bias: Tensor | None = None) -> Tensor:
        """tokens (B, M, D), optional bias (heads, M, M) of the scores -> tokens (B, M, D)."""
        mixed = self_attention(self.qkv(tokens), self.num_heads, bias)  # softmax(query @ key.T / √d + bias) @ value
        return self.proj(self.norm(mixed))


class CrossAttention(nn.Module):
    """Attention from every pixel to the tokens: cost N x M instead of N x N. `sub_norm` as in `SelfAttention`."""

    def __init__(self, dim: int, num_heads: int, sub_norm: bool = False):
        super().__init__()
        check_heads(dim, num_heads)
        self.num_heads = num_heads
        self.to_query = Linear(dim, dim)
        self.to_key_value = Linear(dim, 2 * dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6) if sub_norm else nn.Identity()
        self.proj = Linear(dim, dim)

    def forward(self, pixels: Tensor, tokens: Tensor) -> Tensor:
        """pixels (B, N, D), tokens (B, M, D) -> mixed values (B, N, D)."""
        query, key_value = self.to_query(pixels), self.to_key_value(tokens)
        mixed = cross_attention(query, key_value, self.num_heads)  # PaCa Eq. 1: softmax(query @ key.T / √d) @ value
        return self.proj(self.norm(mixed))


def check_heads(dim: int, num_heads: int) -> None:
    if dim % num_heads:
        raise ValueError(f"dim ({dim}) must be divisible by num_heads ({num_heads}). Choose heads that divide it.")
