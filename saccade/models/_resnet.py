"""timm's plain ResNet blocks, with norm, sum and ReLU in one pass for inference; same names, same numbers.

Where that does not fit, they do what timm's do, written out here: TorchScript knows no call of `super().forward`.
"""

import torch
from timm.models.resnet import BasicBlock, Bottleneck
from torch import Tensor, nn

from saccade.layers.residual import conv_norm_relu, fits_inference


def shortcut_layers(block: nn.Module) -> tuple[nn.Module, ...]:
    """Convolution and norm of a block's shortcut, () where it is the map itself."""
    return () if block.downsample is None else tuple(block.downsample)


class LeanBottleneck(Bottleneck):
    """1x1, 3x3, 1x1."""

    def forward(self, x: Tensor) -> Tensor:
        """x (B, C, H, W) -> (B, C', H', W')."""
        if not torch.jit.is_scripting():  # noqa: SIM102 (TorchScript skips the branch only when it stands alone)
            if self.lean(x):
                return self.answer(x)
        shortcut = x
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.act2(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        if self.drop_path is not None:
            x = self.drop_path(x)
        if self.downsample is not None:
            shortcut = self.downsample(shortcut)
        x += shortcut
        return self.act3(x)

    @torch.jit.ignore
    def lean(self, x: Tensor) -> bool:
        return fits_inference(x, (self.conv1, self.conv2, self.conv3), (self.bn1, self.bn2, self.bn3), self.downsample)

    @torch.jit.ignore
    def answer(self, x: Tensor) -> Tensor:
        hidden = conv_norm_relu(self.conv1, self.bn1, x)
        hidden = conv_norm_relu(self.conv2, self.bn2, hidden)
        return conv_norm_relu(self.conv3, self.bn3, hidden, x, *shortcut_layers(self))


class LeanBasicBlock(BasicBlock):
    """3x3, 3x3."""

    def forward(self, x: Tensor) -> Tensor:
        """x (B, C, H, W) -> (B, C', H', W')."""
        if not torch.jit.is_scripting():  # noqa: SIM102 (TorchScript skips the branch only when it stands alone)
            if self.lean(x):
                return self.answer(x)
        shortcut = x
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        if self.drop_path is not None:
            x = self.drop_path(x)
        if self.downsample is not None:
            shortcut = self.downsample(shortcut)
        x += shortcut
        return self.act2(x)

    @torch.jit.ignore
    def lean(self, x: Tensor) -> bool:
        return fits_inference(x, (self.conv1, self.conv2), (self.bn1, self.bn2), self.downsample)

    @torch.jit.ignore
    def answer(self, x: Tensor) -> Tensor:
        hidden = conv_norm_relu(self.conv1, self.bn1, x)
        return conv_norm_relu(self.conv2, self.bn2, hidden, x, *shortcut_layers(self))
