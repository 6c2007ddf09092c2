"""Relations among visual tokens: transformer, graph convolution, or a feed-forward layer per token (VT Sec. 3.2).

`VisualTokenTransformer` adds to VT Eqs. 3-4 what the reported parameters and FLOPs imply: heads, a value matrix, scaled
scores, batch norm, and residual branches that start as the identity. `EquationTransformer` is Eqs. 3-4 as printed.
"""

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from saccade.layers.linear import LinearNorm, ListNorm
from saccade.ops.attention import token_attention


class FeedForward(nn.Module):
    """tokens + norm(W relu(tokens)): VT Eq. 4 with one matrix, which is what the reported FLOPs allow.

    ReLU precedes the matrix: after a norm whose gain starts at zero it would never pass a gradient. The authors'
    VT-FPN module has none (`relu=False`).
    """

    def __init__(self, dim: int, norm: bool = True, drop_path: float = 0.0, relu: bool = True):
        super().__init__()
        self.act = nn.ReLU() if relu else nn.Identity()
        self.fc = LinearNorm(dim, dim, zero=True, norm=norm)
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, M, D) -> (B, M, D)."""
        return tokens + self.drop_path(self.fc(self.act(tokens)))  # VT Eq. 4


class VisualTokenTransformer(nn.Module):
    """Multi-head attention among the tokens (VT Eq. 3), then `FeedForward` (Eq. 4).

    Queries and keys have half the width of the values. One projection makes both, in `key_groups` groups of channels,
    another the values, in `value_groups`. There is no output projection.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 16,
        key_groups: int = 1,
        value_groups: int = 1,
        norm: bool = True,
        drop_path: float = 0.0,
        relu: bool = True,
    ):
        super().__init__()
        if dim % (2 * num_heads) or num_heads % key_groups:
            raise ValueError(
                f"dim ({dim}) must be divisible by 2 * num_heads ({num_heads}), and num_heads by key_groups "
                f"({key_groups}). Choose other heads or groups."
            )
        self.num_heads = num_heads
        self.to_query_key = LinearNorm(dim, dim, key_groups, norm=norm)  # head by head: query, key
        self.to_value = LinearNorm(dim, dim, value_groups, norm=norm)
        self.norm = ListNorm(dim, zero=True, enabled=norm)
        self.drop_path = DropPath(drop_path)
        self.mlp = FeedForward(dim, norm, drop_path, relu)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, M, D) -> (B, M, D)."""
        query_key, value = self.to_query_key(tokens), self.to_value(tokens)
        if not self.norm.bn.training:  # then the norm is affine, and commutes with a mean whose weights sum to 1
            value = self.norm(value)
        mixed = token_attention(query_key, value, self.num_heads)  # VT Eq. 3: softmax(query @ key.T / √d) @ value
        if self.norm.bn.training:
            mixed = self.norm(mixed)
        return self.mlp(tokens + self.drop_path(mixed))


class EquationTransformer(nn.Module):
    """VT Eqs. 3-4 as printed: one head, no value matrix, no norm, no scale unless `scale`.

    `to_row` is the paper's K and `to_column` its Q: the softmax of (T K)(T Q)ᵀ is over the columns.
    """

    def __init__(self, dim: int, key_dim: int, scale: bool = False, drop_path: float = 0.0):
        super().__init__()
        self.scale = key_dim**-0.5 if scale else 1.0
        self.to_row = nn.Linear(dim, key_dim, bias=False)
        self.to_column = nn.Linear(dim, key_dim, bias=False)
        self.fc1 = nn.Linear(dim, dim, bias=False)
        self.fc2 = nn.Linear(dim, dim, bias=False)
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, M, D) -> (B, M, D)."""
        row, column = self.to_row(tokens), self.to_column(tokens)
        weights = (torch.matmul(row, column.transpose(1, 2)) * self.scale).softmax(-1)  # (B, M, M)
        tokens = tokens + self.drop_path(torch.matmul(weights, tokens))  # VT Eq. 3
        return tokens + self.drop_path(self.fc2(F.relu(self.fc1(tokens))))  # VT Eq. 4


class GraphConvolution(nn.Module):
    """A learned graph G among the tokens, the same for every image: T + relu(norm(G T W)) (VT Table 5).

    G starts as the identity. It has one row per token, so their number is fixed.
    """

    def __init__(self, dim: int, num_tokens: int, norm: bool = True, drop_path: float = 0.0):
        super().__init__()
        self.adjacency = nn.Parameter(torch.eye(num_tokens))
        self.fc = LinearNorm(dim, dim, norm=norm)
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, M, D) -> (B, M, D)."""
        return tokens + self.drop_path(F.relu(self.fc(torch.matmul(self.adjacency, tokens))))
