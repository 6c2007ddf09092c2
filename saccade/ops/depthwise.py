"""Depth-wise convolutions with the activation and the sum around them, on channels-last features."""

import torch.nn.functional as F
from torch import Tensor, nn


def depthwise_conv_reference(
    features: Tensor, weight: Tensor, bias: Tensor | None, act: str = "", shortcut: bool = True
) -> Tensor:
    """3x3 depth-wise convolution of features (B, C, H, W), weight (C, 1, 3, 3).

    act "" is s x + conv(x), "pre" is s gelu(x) + conv(gelu(x)), "post" is gelu(s x + conv(x)); s is 1 with `shortcut`.
    """
    if act == "pre":
        features = F.gelu(features)
    mixed = F.conv2d(features, weight, bias, padding=1, groups=features.shape[1])
    if shortcut:
        mixed = features + mixed
    return F.gelu(mixed) if act == "post" else mixed


depthwise_conv = depthwise_conv_reference


def depthwise_gelu_reference(features: Tensor, conv: nn.Module) -> Tensor:
    """gelu(conv(features)), features (B, C, H, W), conv depth-wise, of any kernel size."""
    return F.gelu(conv(features))


depthwise_gelu = depthwise_gelu_reference
