"""The external clustering network of PaCa: a light convolutional pyramid that scores the tokens of all stages.

It reads the output of the ViT's stem and is trained jointly with the ViT by the classification loss alone (PaCa
Sec. 3.2.3, Fig. 4). Any network can replace it: called with the stem's features, it returns two lists with one entry
per stage, scores (B, M, N) and features (B, C, H, W) to add to the stage's output before its norm; entries may be None.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.layers.grid import to_pixels
from saccade.models.registry import leaf
from saccade.tokens.clusters import ToScore

__all__ = ["ClusteringTeacher"]


class ConvMixerLayer(nn.Module):
    """Depth-wise convolution with a shortcut, then a point-wise layer, each with GELU and BatchNorm."""

    def __init__(self, dim: int, kernel: int = 7):
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, kernel, padding=kernel // 2, groups=dim)
        self.norm1 = nn.BatchNorm2d(dim)
        self.mix = nn.Linear(dim, dim)
        self.norm2 = nn.BatchNorm2d(dim)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> features (B, C, H, W)."""
        features = features + self.norm1(F.gelu(self.conv(features)))
        mixed = self.mix(features.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.norm2(F.gelu(mixed))


class BlurMerge(nn.Module):
    """Downsample by 2 without aliasing: fixed 1-2-1 blur, then a 3x3 convolution of stride 2, GELU, BatchNorm."""

    blur: Tensor

    def __init__(self, in_dim: int, dim: int):
        super().__init__()
        row = torch.tensor([1.0, 2.0, 1.0]) / 4
        self.register_buffer("blur", row[:, None] * row[None, :], persistent=False)
        self.conv = nn.Conv2d(in_dim, dim, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(dim)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> features (B, C', H/2, W/2)."""
        channels = features.shape[1]
        blurred = F.conv2d(features, self.blur.expand(channels, 1, 3, 3), padding=1, groups=channels)
        return self.norm(F.gelu(self.conv(blurred)))


class TopDown(nn.Module):
    """One top-down step of the pyramid: project and upsample the coarse features, add, and mix.

    The authors upsample first; a point-wise layer commutes with bilinear interpolation, and costs a quarter on the
    coarse grid.
    """

    def __init__(self, coarse_dim: int, dim: int, kernel: int = 7):
        super().__init__()
        self.lateral = nn.Linear(coarse_dim, dim)
        self.norm = nn.BatchNorm2d(dim)
        self.refine = ConvMixerLayer(dim, kernel)

    def forward(self, coarse: Tensor, fine: Tensor) -> Tensor:
        """coarse (B, C', H/2, W/2), fine (B, C, H, W) -> features (B, C, H, W)."""
        lateral = self.lateral(coarse.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        lateral = F.interpolate(lateral, [fine.shape[2], fine.shape[3]], mode="bilinear", align_corners=False)
        return self.refine(fine + self.norm(F.gelu(lateral)))


@leaf
class ClusteringTeacher(nn.Module):
    """ConvMixer stages bottom-up, a feature pyramid top-down, and the scores of every stage from it.

    A stage of 0 clusters is not scored; the pyramid ends at the finest stage that is.
    """

    def __init__(self, dims: Sequence[int], depths: Sequence[int], clusters: Sequence[int], kernel: int = 7):
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(*[ConvMixerLayer(dim, kernel) for _ in range(depth)])
            for dim, depth in zip(dims, depths, strict=True)
        )
        self.merges = nn.ModuleList([nn.Identity(), *(BlurMerge(in_dim, dim) for in_dim, dim in pairwise(dims))])
        needed = [i for i in reversed(range(len(dims) - 1)) if any(clusters[: i + 1])]  # coarse to fine
        self.pyramid = nn.ModuleList(TopDown(dims[i + 1], dims[i], kernel) for i in needed)
        self.to_score = nn.ModuleList(
            ToScore(dim, num_tokens) if num_tokens else nn.Identity()
            for dim, num_tokens in zip(dims, clusters, strict=True)
        )
        self.clusters = tuple(clusters)

    def forward(self, features: Tensor) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """features (B, C, H, W) of the stem -> scores (B, M, N) and features (B, C, H, W), one of each per stage."""
        outputs: list[Tensor] = []
        for merge, stage in zip(self.merges, self.stages, strict=True):
            features = stage(merge(features))
            outputs.append(features)
        levels = [features]  # coarse to fine
        for top_down, fine in zip(self.pyramid, outputs[-2::-1], strict=False):
            features = top_down(features, fine)
            levels.append(features)
        scores: list[Tensor | None] = [None] * len(outputs)
        for stage, level in zip(reversed(range(len(outputs))), levels, strict=False):
            if self.clusters[stage]:
                scores[stage] = self.to_score[stage](to_pixels(level))
        return scores, list(outputs)
