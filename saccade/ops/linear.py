"""Linear layers: with GELU, in groups of channels, and with faster gradients in half precision."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def linear_reference(vectors: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """vectors (..., C), weight (D, C) -> (..., D)."""
    return F.linear(vectors, weight, bias)


linear = linear_reference


def linear_gelu_reference(vectors: Tensor, layer: nn.Module) -> Tensor:
    """gelu(layer(vectors)), vectors (..., C) -> (..., D)."""
    return F.gelu(layer(vectors))


linear_gelu = linear_gelu_reference


def grouped_linear_reference(vectors: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """vectors (B, N, C), weight (groups, C/groups, D/groups), bias (D) -> (B, N, D): a grouped 1x1 convolution."""
    grouped = vectors.unflatten(2, (weight.shape[0], -1))  # (B, N, groups, C/groups)
    mixed = torch.einsum("bngc,gcd->bngd", grouped, weight).flatten(2)
    return mixed if bias is None else mixed + bias


grouped_linear = grouped_linear_reference
