"""Semantic FPN: the semantic branch of Panoptic FPN (arXiv 1901.02446), the baseline of VT Sec. 5.3, Tables 9-10.

A neck maps every level of the pyramid to one width and mixes the levels; a branch sums them at the finest level.
`vt_fpn` replaces the neck only (VT Fig. 4).
"""

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork

from saccade.heads.classifier import PixelClassifier
from saccade.layers.conv import ConvNormRelu, resize_like


class FPN(nn.Module):
    """torchvision's feature pyramid: 1x1 lateral convolutions, top-down addition, 3x3 output convolutions."""

    def __init__(self, channels: Sequence[int], dim: int = 256):
        super().__init__()
        self.fpn = FeaturePyramidNetwork(list(channels), dim)

    def forward(self, pyramid: list[Tensor]) -> list[Tensor]:
        """features (B, C_i, H_i, W_i), fine to coarse -> features (B, dim, H_i, W_i)."""
        return list(self.fpn({str(level): features for level, features in enumerate(pyramid)}).values())


class SemanticBranch(nn.Module):
    """Upsample every level to the finest in steps of one level, a 3x3 convolution before each step, and sum."""

    def __init__(self, levels: int, in_dim: int = 256, dim: int = 128, groups: int = 0):
        super().__init__()
        self.levels = nn.ModuleList(
            nn.ModuleList(ConvNormRelu(dim if step else in_dim, dim, 3, groups) for step in range(max(1, level)))
            for level in range(levels)
        )

    def forward(self, pyramid: list[Tensor]) -> Tensor:
        """features (B, C, H_i, W_i), fine to coarse -> features (B, dim, H_0, W_0)."""
        levels = [cast(nn.ModuleList, blocks) for blocks in self.levels]  # ModuleList does not type its elements
        total = levels[0][0](pyramid[0])
        for level, blocks in enumerate(levels[1:], start=1):
            features = pyramid[level]
            for step, block in enumerate(blocks):
                features = resize_like(block(features), pyramid[level - 1 - step])
            total = total + features
        return total


class FPNHead(nn.Module):
    """A neck, the semantic branch and a pixel classifier.

    Args:
        neck: pyramid -> pyramid of `dim` channels; `FPN` by default.
        dim, branch_dim: channels of the neck's output and of the branch.
        groups: GroupNorm with this many groups in the branch, as in Panoptic FPN; 0 for BatchNorm, as in VT.
    """

    def __init__(
        self,
        channels: Sequence[int],
        num_classes: int,
        neck: nn.Module | None = None,
        dim: int = 256,
        branch_dim: int = 128,
        groups: int = 0,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.neck = FPN(channels, dim) if neck is None else neck
        self.branch = SemanticBranch(len(channels), dim, branch_dim, groups)
        self.classifier = PixelClassifier(branch_dim, num_classes, dropout)

    def forward(self, pyramid: list[Tensor]) -> tuple[Tensor, None]:
        """features (B, C_i, H_i, W_i), fine to coarse -> logits (B, K, H_0, W_0); no auxiliary logits."""
        return self.classifier(self.branch(self.neck(pyramid))), None
