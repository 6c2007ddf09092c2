"""Semantic FPN (Panoptic FPN's semantic branch, arXiv 1901.02446): the baseline that VT-FPN replaces (VT-62, VT-63).

Two halves: a neck brings every level of the pyramid to one width and lets the levels talk, and a branch sums them up
at the finest. `vt_fpn` changes the neck alone.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork

from saccade.heads.classifier import PixelClassifier
from saccade.layers.conv import ConvNormRelu, resize_like


class FPN(nn.Module):
    """torchvision's: 1x1 convolutions to one width, coarse added to fine, 3x3 convolutions behind."""

    def __init__(self, channels: Sequence[int], dim: int = 256):
        super().__init__()
        self.fpn = FeaturePyramidNetwork(list(channels), dim)

    def forward(self, pyramid: list[Tensor]) -> list[Tensor]:
        """maps (B, C_i, H_i, W_i), fine to coarse -> maps (B, dim, H_i, W_i)."""
        return list(self.fpn({str(level): features for level, features in enumerate(pyramid)}).values())


class SemanticBranch(nn.Module):
    """Every level walks up to the finest, a 3x3 convolution before each step, and all are added there."""

    def __init__(self, levels: int, in_dim: int = 256, dim: int = 128, groups: int = 0):
        super().__init__()
        self.levels = nn.ModuleList(
            nn.ModuleList(ConvNormRelu(dim if step else in_dim, dim, 3, groups) for step in range(max(1, level)))
            for level in range(levels)
        )

    def forward(self, pyramid: list[Tensor]) -> Tensor:
        """maps (B, C, H_i, W_i), fine to coarse -> features (B, dim, H_0, W_0)."""
        total = self.levels[0][0](pyramid[0])
        for level, blocks in enumerate(self.levels):
            if level:
                features = pyramid[level]
                for step, block in enumerate(blocks):
                    features = resize_like(block(features), pyramid[level - 1 - step])
                total = total + features
        return total


class FPNHead(nn.Module):
    """A neck, the semantic branch, and a classifier a pixel.

    Args:
        neck: pyramid -> pyramid of `dim` channels; `FPN` unless another is given.
        dim, branch_dim: channels of the neck's maps and of the branch.
        groups: GroupNorm of so many groups in the branch, as in Panoptic FPN; 0 is BatchNorm, as VT trained it.
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
        """maps (B, C_i, H_i, W_i), fine to coarse -> logits (B, K, H_0, W_0), and no second opinion."""
        return self.classifier(self.branch(self.neck(pyramid))), None
