"""Multi-head self-attention over a list of vectors."""

import torch.nn.functional as F
from torch import Tensor, nn


class SelfAttention(nn.Module):
    """Every vector asks all the others; one fused projection, PyTorch's fused attention."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"width {dim} does not divide into {num_heads} heads; choose heads that divide it.")
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor, bias: Tensor | None = None) -> Tensor:
        """tokens (B, M, D), optional bias (heads, M, M) added to the scores -> tokens (B, M, D)."""
        qkv = self.qkv(tokens).unflatten(2, (3, self.num_heads, -1))  # (B, M, 3, heads, D/heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, M, D/heads) each
        if bias is not None:
            bias = bias.to(query.dtype)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.proj(mixed.transpose(1, 2).flatten(2))
