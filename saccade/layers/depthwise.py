"""3x3 depth-wise convolution with a sum and a GELU around it."""

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
