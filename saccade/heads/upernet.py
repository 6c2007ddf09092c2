"""UperNet (arXiv 1807.10221), the head of SViT Sec. 4.3 and PaCa Sec. 4.3: pyramid pooling, FPN, fusion."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.heads.classifier import PixelClassifier
from saccade.layers.conv import ConvNormRelu, resize_like


class PyramidPooling(nn.Module):
    """Concatenate the coarsest map with its averages over 1x1, 2x2, 3x3 and 6x6 cells (PSPNet, arXiv 1612.01105)."""

    def __init__(self, in_dim: int, dim: int, parts: Sequence[int] = (1, 2, 3, 6)):
        super().__init__()
        self.parts = list(parts)
        self.levels = nn.ModuleList(ConvNormRelu(in_dim, dim) for _ in parts)
        self.fuse = ConvNormRelu(in_dim + len(parts) * dim, dim, 3)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> features (B, D, H, W)."""
        if self.training and features.shape[0] == 1:
            raise ValueError(
                "expected a batch of at least 2 in training, got 1: pyramid pooling averages each map to one pixel, "
                "and BatchNorm needs two values per channel. Increase the batch size."
            )
        pooled = [
            resize_like(level(F.adaptive_avg_pool2d(features, parts)), features)
            for level, parts in zip(self.levels, self.parts, strict=True)
        ]
        return self.fuse(torch.cat([features, *pooled], dim=1))


class FCNHead(nn.Module):
    """A 3x3 convolution and a classifier on one level."""

    def __init__(self, in_dim: int, num_classes: int, dim: int = 256, dropout: float = 0.1):
        super().__init__()
        self.conv = ConvNormRelu(in_dim, dim, 3)
        self.classifier = PixelClassifier(dim, num_classes, dropout)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> logits (B, K, H, W)."""
        return self.classifier(self.conv(features))


class UperNetHead(nn.Module):
    """Pyramid pooling on the coarsest level, top-down addition, all levels fused at the finest.

    The auxiliary head reads the second-coarsest level and runs in training only. `auxiliary_dim=0` omits it.
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
        """features (B, C_i, H_i, W_i), fine to coarse -> logits (B, K, H_0, W_0), auxiliary logits in training."""
        levels = [lateral(features) for lateral, features in zip(self.lateral, pyramid[:-1], strict=True)]
        levels.append(self.pooling(pyramid[-1]))
        for i in range(len(levels) - 1, 0, -1):
            levels[i - 1] = levels[i - 1] + resize_like(levels[i], levels[i - 1])
        smooth = [block(features) for block, features in zip(self.smooth, levels[:-1], strict=True)] + levels[-1:]
        fused = self.fuse(torch.cat([smooth[0], *(resize_like(coarse, smooth[0]) for coarse in smooth[1:])], dim=1))
        auxiliary = self.auxiliary(pyramid[-2]) if self.auxiliary is not None and self.training else None
        return self.classifier(fused), auxiliary
