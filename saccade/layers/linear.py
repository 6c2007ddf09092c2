"""Linear layers over the channels of a list of vectors, with batch norm behind them: 1x1 convolutions on a list."""

import torch
from torch import Tensor, nn


class GroupedLinear(nn.Module):
    """Channels in groups, each with its own matrix, without bias: a grouped 1x1 convolution, as one batched product."""

    def __init__(self, in_dim: int, dim: int, groups: int):
        super().__init__()
        if in_dim % groups or dim % groups:
            raise ValueError(f"{in_dim} and {dim} channels do not both divide into {groups} groups; choose fewer.")
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(groups, in_dim // groups, dim // groups))
        nn.init.uniform_(self.weight, -((in_dim // groups) ** -0.5), (in_dim // groups) ** -0.5)  # as nn.Linear

    def forward(self, vectors: Tensor) -> Tensor:
        """vectors (B, N, C) -> (B, N, D)."""
        grouped = vectors.unflatten(2, (self.groups, -1))  # (B, N, groups, C/groups)
        return torch.einsum("bngc,gcd->bngd", grouped, self.weight).flatten(2)

    def extra_repr(self) -> str:
        groups, in_dim, dim = self.weight.shape
        return f"{groups * in_dim}, {groups * dim}, groups={groups}"


class ListNorm(nn.Module):
    """BatchNorm over the channels of a list of vectors; the list is only viewed another way.

    `zero` starts the gain at zero: at the end of a residual branch, the branch then starts as nothing.
    `enabled=False` is no norm at all.
    """

    def __init__(self, dim: int, zero: bool = False, enabled: bool = True):
        super().__init__()
        self.bn = nn.BatchNorm1d(dim) if enabled else nn.Identity()
        if zero and enabled:
            nn.init.zeros_(self.bn.weight)

    def forward(self, vectors: Tensor) -> Tensor:
        """vectors (B, N, C) -> (B, N, C)."""
        return self.bn(vectors.flatten(0, 1)).unflatten(0, (vectors.shape[0], vectors.shape[1]))


class LinearNorm(nn.Module):
    """A linear map over channels without bias, grouped or not, then BatchNorm."""

    def __init__(self, in_dim: int, dim: int, groups: int = 1, zero: bool = False, norm: bool = True):
        super().__init__()
        self.linear = GroupedLinear(in_dim, dim, groups) if groups > 1 else nn.Linear(in_dim, dim, bias=False)
        self.norm = ListNorm(dim, zero, norm)

    def forward(self, vectors: Tensor) -> Tensor:
        """vectors (B, N, C) -> (B, N, D)."""
        return self.norm(self.linear(vectors))
