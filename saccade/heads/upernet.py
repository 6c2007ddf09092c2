"""UperNet (arXiv 1807.10221), as SViT and PaCa use it: pooling, FPN, fusion, an auxiliary head (PACA-54)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.heads.classifier import PixelClassifier
from saccade.layers.conv import ConvNormRelu, resize_like


class PyramidPooling(nn.Module):
    """The coarsest map beside its averages over 1x1, 2x2, 3x3 and 6x6 parts of the image (arXiv 1612.01105)."""

    def __init__(self, in_dim: int, dim: int, parts: Sequence[int] = (1, 2, 3, 6)):
        super().__init__()
        self.parts = list(parts)
        self.levels = nn.ModuleList(ConvNormRelu(in_dim, dim) for _ in parts)
        self.fuse = ConvNormRelu(in_dim + len(parts) * dim, dim, 3)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> features (B, D, H, W)."""
        if self.training and features.shape[0] == 1:
            raise ValueError(
                "pyramid pooling averages the map down to one pixel, and BatchNorm learns from two values or more: "
                "train with a batch of at least 2."
            )
        pooled = [
            resize_like(level(F.adaptive_avg_pool2d(features, parts)), features)
            for level, parts in zip(self.levels, self.parts, strict=True)
        ]
        return self.fuse(torch.cat([features, *pooled], dim=1))


class FCNHead(nn.Module):
    """One 3x3 convolution and a classifier, on one level."""

    def __init__(self, in_dim: int, num_classes: int, dim: int = 256, dropout: float = 0.1):
        super().__init__()
        self.conv = ConvNormRelu(in_dim, dim, 3)
        self.classifier = PixelClassifier(dim, num_classes, dropout)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> logits (B, K, H, W)."""
        return self.classifier(self.conv(features))


class UperNetHead(nn.Module):
    """Pooling on top, coarse added to fine, everything fused at the finest level.

    The auxiliary head reads the second-coarsest level and only runs in training.
    """

    def __init__(
        self,
        channels: Sequence[int],
        num_classes: int,
        dim: int = 512,
        parts: Sequence[int] = (1, 2, 3, 6),
        auxiliary_dim: int = 256,
        dropout: float = 0.1,
    ):
        super().__init__()
        self.pooling = PyramidPooling(channels[-1], dim, parts)
        self.lateral = nn.ModuleList(ConvNormRelu(width, dim) for width in channels[:-1])
        self.smooth = nn.ModuleList(ConvNormRelu(dim, dim, 3) for _ in channels[:-1])
        self.fuse = ConvNormRelu(len(channels) * dim, dim, 3)
        self.classifier = PixelClassifier(dim, num_classes, dropout)
        self.auxiliary = FCNHead(channels[-2], num_classes, auxiliary_dim, dropout) if auxiliary_dim else None

    def forward(self, pyramid: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """maps (B, C_i, H_i, W_i), fine to coarse -> logits (B, K, H_0, W_0), in training the auxiliary ones too."""
        maps = [lateral(features) for lateral, features in zip(self.lateral, pyramid[:-1], strict=True)]
        maps.append(self.pooling(pyramid[-1]))
        for i in range(len(maps) - 1, 0, -1):
            maps[i - 1] = maps[i - 1] + resize_like(maps[i], maps[i - 1])
        smooth = [block(features) for block, features in zip(self.smooth, maps[:-1], strict=True)] + maps[-1:]
        fused = self.fuse(torch.cat([smooth[0], *(resize_like(coarse, smooth[0]) for coarse in smooth[1:])], dim=1))
        second = self.auxiliary(pyramid[-2]) if self.auxiliary is not None and self.training else None
        return self.classifier(fused), second
