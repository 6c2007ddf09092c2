"""Layers whose parameters are given tensors, so that operations over layers can be checked as functions of tensors."""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Layer = TypeVar("Layer", bound=nn.Module)


def with_tensors(layer: Layer, **tensors: Tensor | None) -> Layer:
    """The layer with these in place of its parameters and buffers; gradients reach them."""
    for name, tensor in tensors.items():
        layer._parameters.pop(name, None)
        layer._buffers.pop(name, None)
        setattr(layer, name, tensor)
    return layer


def conv_of(weight: Tensor, bias: Tensor | None = None, **options: Any) -> nn.Conv2d:
    """A convolution with these parameters."""
    out_channels, channels, *kernel = weight.shape
    channels *= options.get("groups", 1)
    return with_tensors(nn.Conv2d(channels, out_channels, tuple(kernel), **options), weight=weight, bias=bias)


def eval_norm(channels: int, seed: int = 0) -> nn.BatchNorm2d:
    """A BatchNorm with random parameters and statistics (gains of both signs), for inference."""
    generator = torch.Generator().manual_seed(seed)
    norm = nn.BatchNorm2d(channels).eval()
    with torch.no_grad():
        for tensor in (norm.weight, norm.bias, norm.running_mean):
            tensor.copy_(torch.randn(channels, generator=generator))
        norm.running_var.uniform_(0.5, 2, generator=generator)
    return norm
