"""A depth-wise 3x3 convolution with what stands around it: the sum with its input, the GELU before or after."""

import torch
from torch import Tensor, nn

from saccade.kernels.depthwise import depthwise, depthwise_twin


class DepthwiseConv(nn.Conv2d):
    """`act` is "", "pre" (y = gelu(x) + conv(gelu(x))) or "post" (y = gelu(x + conv(x))); `shortcut` keeps the sum."""

    def __init__(self, dim: int, act: str = "", shortcut: bool = True):
        super().__init__(dim, dim, 3, padding=1, groups=dim)
        self.act = act
        self.shortcut = shortcut

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> features (B, C, H, W)."""
        if torch.jit.is_scripting():
            return depthwise_twin(features, self.weight, self.bias, self.act, self.shortcut)
        else:
            return depthwise(features, self.weight, self.bias, self.act, self.shortcut)
