"""Convolutions with what surrounds them (depth-wise with a sum, dense with norm and ReLU), and bilinear resizing."""

import torch.nn.functional as F
from torch import Tensor, nn

from saccade import ops
from saccade.ops import plain_layer


@plain_layer
class DepthwiseConv(nn.Conv2d):
    """y = x + conv(x), with act "pre" gelu(x) + conv(gelu(x)), with "post" gelu(x + conv(x)).

    Without `shortcut` there is no sum.
    """

    def __init__(self, dim: int, act: str = "", shortcut: bool = True):
        super().__init__(dim, dim, 3, padding=1, groups=dim)
        self.act = act
        self.shortcut = shortcut

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> features (B, C, H, W)."""
        return ops.depthwise_conv(features, self.weight, self.bias, self.act, self.shortcut)


class ConvNormRelu(nn.Module):
    """Convolution of stride 1 without bias, BatchNorm (or GroupNorm with `groups`), ReLU; keeps height and width."""

    def __init__(self, in_dim: int, dim: int, kernel: int = 1, groups: int = 0):
        super().__init__()
        self.conv = nn.Conv2d(in_dim, dim, kernel, padding=kernel // 2, bias=False)
        self.norm = nn.GroupNorm(groups, dim) if groups else nn.BatchNorm2d(dim)
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> features (B, D, H, W)."""
        return ops.conv_norm_act(features, self.conv, self.norm, act="relu")


def resize(features: Tensor, height: int, width: int) -> Tensor:
    """features (B, C, h, w) -> (B, C, H, W), bilinear, with align_corners=False."""
    return F.interpolate(features, (height, width), mode="bilinear", align_corners=False)


def resize_like(features: Tensor, other: Tensor) -> Tensor:
    """features (B, C, h, w), resized to the height and width of other features."""
    return resize(features, other.shape[2], other.shape[3])
