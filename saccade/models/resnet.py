"""ResNet blocks with timm's parameter names, whose norm, sum and ReLU are fused with the convolutions.

The ReLUs are part of the operations: timm's modules `act1` to `act3` are not called.
"""

from timm.models.resnet import BasicBlock, Bottleneck
from torch import Tensor, nn

from saccade import ops


class FusedBottleneck(Bottleneck):
    """1x1, 3x3, 1x1 convolutions and the shortcut."""

    downsample: nn.Sequential | None

    def forward(self, x: Tensor) -> Tensor:
        """x (B, C, H, W) -> (B, C', H', W')."""
        hidden = ops.conv_norm_act(x, self.conv1, self.bn1, act="relu")
        hidden = ops.conv_norm_act(hidden, self.conv2, self.bn2, act="relu")
        return ops.conv_norm_act(hidden, self.conv3, self.bn3, "relu", x, self.downsample, self.drop_path)


class FusedBasicBlock(BasicBlock):
    """Two 3x3 convolutions and the shortcut."""

    downsample: nn.Sequential | None

    def forward(self, x: Tensor) -> Tensor:
        """x (B, C, H, W) -> (B, C', H', W')."""
        hidden = ops.conv_norm_act(x, self.conv1, self.bn1, act="relu")
        return ops.conv_norm_act(hidden, self.conv2, self.bn2, "relu", x, self.downsample, self.drop_path)
