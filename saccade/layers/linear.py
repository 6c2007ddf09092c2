"""Linear layers over the channels of a list of vectors, followed by batch norm: 1x1 convolutions on a list."""

from typing import Any

import torch
from torch import Tensor, nn

from saccade.ops import plain_layer
from saccade.ops.batch_norm import norm_act
from saccade.ops.linear import grouped_linear, linear


@plain_layer
class Linear(nn.Linear):
    """nn.Linear by `saccade.ops`."""

    cast_weights = True  # by saccade.ops._weights

    def forward(self, input: Tensor) -> Tensor:
        """input (..., C) -> (..., D)."""
        return linear(input, self.weight, self.bias)


class GroupedLinear(nn.Module):
    """A linear map per group of channels, without bias: a grouped 1x1 convolution."""

    cast_weights = True  # by saccade.ops._weights

    def __init__(self, in_dim: int, dim: int, groups: int):
        super().__init__()
        if in_dim % groups or dim % groups:
            raise ValueError(
                f"in_dim ({in_dim}) and dim ({dim}) must be divisible by groups ({groups}). Choose fewer groups."
            )
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(groups, in_dim // groups, dim // groups))
        nn.init.uniform_(self.weight, -((in_dim // groups) ** -0.5), (in_dim // groups) ** -0.5)  # as nn.Linear

    def forward(self, vectors: Tensor) -> Tensor:
        """vectors (B, N, C) -> (B, N, D)."""
        return grouped_linear(vectors, self.weight)

    def extra_repr(self) -> str:
        groups, in_dim, dim = self.weight.shape
        return f"{groups * in_dim}, {groups * dim}, groups={groups}"


class ListNorm(nn.Module):
    """BatchNorm over the channels of a list of vectors.

    `zero` initialises the gain to zero, so that a residual branch that ends here starts as the identity.
    `enabled=False` is no norm at all.
    """

    def __init__(self, dim: int, zero: bool = False, enabled: bool = True):
        super().__init__()
        self.bn = nn.BatchNorm1d(dim) if enabled else nn.Identity()
        if zero and isinstance(self.bn, nn.BatchNorm1d):
            nn.init.zeros_(self.bn.weight)

    def forward(self, vectors: Tensor) -> Tensor:
        """vectors (B, N, C) -> (B, N, C)."""
        return norm_act(vectors.flatten(0, 1), self.bn).unflatten(0, (vectors.shape[0], vectors.shape[1]))


class LinearNorm(nn.Module):
    """A linear map over channels without bias, grouped or not, then BatchNorm."""

    def __init__(self, in_dim: int, dim: int, groups: int = 1, zero: bool = False, norm: bool = True):
        super().__init__()
        self.groups = groups
        self.linear = GroupedLinear(in_dim, dim, groups) if groups > 1 else Linear(in_dim, dim, bias=False)
        self.norm = ListNorm(dim, zero, norm)

    def forward(self, vectors: Tensor) -> Tensor:
        """vectors (B, N, C) -> (B, N, D)."""
        return self.norm(self.linear(vectors))


class FoldedLinearNorm(LinearNorm):
    """`LinearNorm` for long lists: in evaluation the norm is folded into the matrix, and the list is read once."""

    def forward(self, vectors: Tensor) -> Tensor:
        """vectors (B, N, C) -> (B, N, D)."""
        bn: Any = self.norm.bn  # BatchNorm1d, or what SyncBatchNorm conversion made of it
        if bn.training:
            return self.norm(self.linear(vectors))
        gain = bn.weight * (bn.running_var + bn.eps).rsqrt()
        bias = bn.bias - bn.running_mean * gain
        return affine_map(vectors, scale_outputs(self.linear.weight, gain), bias)


class FixedLinear(nn.Module):
    """A frozen linear map with bias, grouped or not: `LinearNorm` after folding its norm."""

    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__()
        self.groups = weight.shape[0] if weight.ndim == 3 else 1
        self.weight = nn.Parameter(weight, requires_grad=False)  # (D, C), or (groups, C/groups, D/groups)
        self.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, vectors: Tensor) -> Tensor:
        """vectors (B, N, C) -> (B, N, D)."""
        return affine_map(vectors, self.weight, self.bias)


def init_linear(layer: nn.Linear) -> None:
    """Weights normal with a deviation of 0.02, truncated in the authors' code at 2, which is 100 deviations: timm's
    trunc_normal_ overflows to exactly 2. The bias is zero."""
    nn.init.normal_(layer.weight, std=0.02)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def affine_map(vectors: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """vectors (B, N, C) -> (B, N, D); weight (D, C), or (groups, C/groups, D/groups)."""
    return (linear if weight.ndim == 2 else grouped_linear)(vectors, weight, bias)


def scale_outputs(weight: Tensor, gain: Tensor) -> Tensor:
    """Multiply every output channel by its gain (D,): weight (D, C), or (groups, C/groups, D/groups)."""
    return weight * (gain.unsqueeze(1) if weight.ndim == 2 else gain.unflatten(0, (weight.shape[0], 1, -1)))


def pixel_linear(in_dim: int, dim: int, groups: int = 1, norm: bool = True) -> LinearNorm:
    """The linear map of pixels to `dim` channels, with the norm folded in evaluation."""
    return FoldedLinearNorm(in_dim, dim, groups) if norm else LinearNorm(in_dim, dim, groups, norm=False)
