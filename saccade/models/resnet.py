"""timm's plain ResNet blocks, with norm, sum and ReLU in one pass; same names, same numbers.

Where that does not fit, they do what timm's do, written out here: TorchScript knows no call of `super().forward`.
"""

import torch
from timm.models.resnet import BasicBlock, Bottleneck
from torch import Tensor, nn

from saccade.layers.batch_norm import fused_norm, heard, learns_fused, norm_relu
from saccade.layers.residual import conv_norm_relu, fits_inference, fits_training, folds_inside


def shortcut_layers(block: nn.Module) -> tuple[nn.Module, ...]:
    """Convolution and norm of a block's shortcut, () where it is the map itself."""
    return () if block.downsample is None else tuple(block.downsample)


def learns(block: nn.Module, x: Tensor, norms: tuple[nn.Module, ...], acts: tuple[nn.Module, ...]) -> bool:
    """Whether a block's norms learn by the fused kernel; stochastic depth stands between norm and sum."""
    dropped = block.drop_path is not None and block.drop_path.drop_prob > 0
    return not dropped and fits_training(x, norms, acts)


def shortcut_of(block: nn.Module, x: Tensor) -> Tensor:
    """What a learning block adds: the map, or what its convolution and norm make of it."""
    layers = shortcut_layers(block)
    if len(layers) == 2 and not heard((block.downsample, *layers)):
        conv, norm = layers
        x = conv(x)
        return fused_norm(norm, x) if learns_fused(norm, x) else norm(x)
    return x if block.downsample is None else block.downsample(x)


class LeanBottleneck(Bottleneck):
    """1x1, 3x3, 1x1."""

    def forward(self, x: Tensor) -> Tensor:
        """x (B, C, H, W) -> (B, C', H', W')."""
        if not torch.jit.is_scripting():
            if self.lean(x):
                return self.answer(x)
            if learns(self, x, (self.bn1, self.bn2, self.bn3), (self.act1, self.act2, self.act3)):
                hidden = norm_relu(self.bn2, self.conv2(norm_relu(self.bn1, self.conv1(x))))
                return norm_relu(self.bn3, self.conv3(hidden), shortcut_of(self, x))
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
        layers = (self.conv1, self.conv2, self.conv3), (self.bn1, self.bn2, self.bn3), self.downsample
        return fits_inference(x, *layers) or folds_inside(x, *layers)

    @torch.jit.ignore
    def answer(self, x: Tensor) -> Tensor:
        hidden = conv_norm_relu(self.conv1, self.bn1, x)
        hidden = conv_norm_relu(self.conv2, self.bn2, hidden)
        return conv_norm_relu(self.conv3, self.bn3, hidden, x, *shortcut_layers(self))


class LeanBasicBlock(BasicBlock):
    """3x3, 3x3."""

    def forward(self, x: Tensor) -> Tensor:
        """x (B, C, H, W) -> (B, C', H', W')."""
        if not torch.jit.is_scripting():
            if self.lean(x):
                return self.answer(x)
            if learns(self, x, (self.bn1, self.bn2), (self.act1, self.act2)):
                return norm_relu(self.bn2, self.conv2(norm_relu(self.bn1, self.conv1(x))), shortcut_of(self, x))
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
        layers = (self.conv1, self.conv2), (self.bn1, self.bn2), self.downsample
        return fits_inference(x, *layers) or folds_inside(x, *layers)

    @torch.jit.ignore
    def answer(self, x: Tensor) -> Tensor:
        hidden = conv_norm_relu(self.conv1, self.bn1, x)
        return conv_norm_relu(self.conv2, self.bn2, hidden, x, *shortcut_layers(self))
