"""Ways to relate a few vectors to each other: transformer, graph convolution, or only a map of each by itself.

The transformer's maps are followed by batch norm, its scores are divided by the root of their width, and the gain at
the end of each residual branch starts at zero, so that a fresh one is the identity. None of that is in the published
equations (VT, Eq. 3 and 4); `EquationTransformer` is their letter.
"""

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from saccade.kernels import token_attention
from saccade.kernels.token_attention import ask_each_other_twin
from saccade.layers.attention import tokens_ask
from saccade.layers.linear import LinearNorm, ListNorm


class FeedForward(nn.Module):
    """Every vector by itself: v + norm(W · relu(v)) (VTR-05: one matrix, not two).

    The ReLU stands before the matrix: behind a norm whose gain starts at zero it would never pass a gradient.
    """

    def __init__(self, dim: int, norm: bool = True, drop_path: float = 0.0):
        super().__init__()
        self.fc = LinearNorm(dim, dim, zero=True, norm=norm)
        self.drop_path = DropPath(drop_path)

    def forward(self, vectors: Tensor) -> Tensor:
        """vectors (B, M, D) -> (B, M, D)."""
        return vectors + self.drop_path(self.fc(F.relu(vectors)))


class TokenTransformer(nn.Module):
    """Attention among the vectors, then `FeedForward` (VT-15 … VT-18, VTR-05, VTR-06).

    Queries and keys have half the width of the values. They are made together, in `key_groups` groups of channels;
    the values in `value_groups`. Attention has no matrix behind it.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 16,
        key_groups: int = 1,
        value_groups: int = 1,
        norm: bool = True,
        drop_path: float = 0.0,
    ):
        super().__init__()
        if dim % (2 * num_heads) or num_heads % key_groups:
            raise ValueError(
                f"width {dim} does not divide into {num_heads} heads of even width in {key_groups} groups; "
                "choose heads that divide half the width and groups that divide the heads."
            )
        self.num_heads = num_heads
        self.to_query_key = LinearNorm(dim, dim, key_groups, norm=norm)  # head by head: query, key
        self.to_value = LinearNorm(dim, dim, value_groups, norm=norm)
        self.norm = ListNorm(dim, zero=True, enabled=norm)
        self.drop_path = DropPath(drop_path)
        self.mlp = FeedForward(dim, norm, drop_path)

    def forward(self, vectors: Tensor) -> Tensor:
        """vectors (B, M, D) -> (B, M, D)."""
        query_key, value = self.to_query_key(vectors), self.to_value(vectors)
        if not self.norm.bn.training:
            # With fixed statistics the norm is affine, and weights that sum to 1 let it pass.
            value = self.norm(value)
        mixed = ask_each_other(query_key, value, self.num_heads)
        if self.norm.bn.training:
            mixed = self.norm(mixed)
        vectors = vectors + self.drop_path(mixed)
        return self.mlp(vectors)


def ask_each_other(query_key: Tensor, value: Tensor, num_heads: int) -> Tensor:
    """query_key (B, M, E), head by head query, key; value (B, M, D) -> mixed values (B, M, D)."""
    if not torch.jit.is_scripting():
        count, widths = value.shape[1], (query_key.shape[2] // num_heads // 2, value.shape[2] // num_heads)
        if tokens_ask(count, count, widths, query_key, value):
            return token_attention.ask_each_other(query_key, value, num_heads)
    return ask_each_other_twin(query_key, value, num_heads)


class EquationTransformer(nn.Module):
    """Eq. 3 and 4 by the letter: one head, no value matrix, no norm, no scale unless `scale`.

    `to_row` is the paper's K and `to_column` its Q: the product (T K)(T Q)ᵀ is normalised along its rows.
    """

    def __init__(self, dim: int, key_dim: int, scale: bool = False, drop_path: float = 0.0):
        super().__init__()
        self.scale = key_dim**-0.5 if scale else 1.0
        self.to_row = nn.Linear(dim, key_dim, bias=False)
        self.to_column = nn.Linear(dim, key_dim, bias=False)
        self.fc1 = nn.Linear(dim, dim, bias=False)
        self.fc2 = nn.Linear(dim, dim, bias=False)
        self.drop_path = DropPath(drop_path)

    def forward(self, vectors: Tensor) -> Tensor:
        """vectors (B, M, D) -> (B, M, D)."""
        row, column = self.to_row(vectors), self.to_column(vectors)
        weights = (torch.matmul(row, column.transpose(1, 2)) * self.scale).softmax(-1)  # (B, M, M)
        vectors = vectors + self.drop_path(torch.matmul(weights, vectors))
        return vectors + self.drop_path(self.fc2(F.relu(self.fc1(vectors))))


class GraphConvolution(nn.Module):
    """A learned graph between the vectors, the same for every image: V + relu(norm(G V W)) (VT-20).

    G starts as the identity. It has one row a vector, so their number is fixed.
    """

    def __init__(self, dim: int, num_vectors: int, norm: bool = True, drop_path: float = 0.0):
        super().__init__()
        self.adjacency = nn.Parameter(torch.eye(num_vectors))
        self.fc = LinearNorm(dim, dim, norm=norm)
        self.drop_path = DropPath(drop_path)

    def forward(self, vectors: Tensor) -> Tensor:
        """vectors (B, M, D) -> (B, M, D)."""
        return vectors + self.drop_path(F.relu(self.fc(torch.matmul(self.adjacency, vectors))))
