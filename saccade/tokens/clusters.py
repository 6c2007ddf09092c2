"""Clusters: pixels grouped into a fixed number of tokens by a learned assignment (PaCa Sec. 3.2).

A clustering scores every pixel for every token. The softmax runs over the pixels, so a token's weights are a
distribution over the image, and the token is the weighted mean of the pixels. No parameter depends on the number of
pixels: the same weights run at any size. Scores and assignment are (B, M, N) in memory: the softmax and the products
with the pixels then read contiguous rows (a fifth faster than (B, N, M) on a CPU at 512 px).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade import ops
from saccade.layers.grid import to_pixels
from saccade.layers.linear import Linear
from saccade.layers.norm import TokenNorm
from saccade.tokens.trace import AssignmentTrace


class ToScore(nn.Linear):
    """A linear layer with one contiguous row of scores per token: pixels (B, N, C) -> scores (B, M, N)."""

    def forward(self, pixels: Tensor) -> Tensor:
        weight = self.weight.expand(pixels.shape[0], -1, -1)  # (B, M, C)
        if self.bias is None:
            return torch.bmm(weight, pixels.transpose(1, 2))
        return torch.baddbmm(self.bias.unsqueeze(1), weight, pixels.transpose(1, 2))


class ConvClustering(nn.Module):
    """Clustering by convolution: scores from the 7x7 neighbourhood of a pixel.

    PaCa Eq. 4 (depth-wise and point-wise convolution, each with GELU), then the scores of PaCa Eq. 5, without bias as
    in the authors' code.
    """

    def __init__(self, dim: int, num_tokens: int, kernel: int = 7):
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, kernel, padding=kernel // 2, groups=dim)
        self.mix = Linear(dim, dim)
        self.to_score = ToScore(dim, num_tokens, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> scores (B, M, N)."""
        pixels = to_pixels(ops.depthwise_gelu(features, self.conv))  # gelu(conv(x))
        pixels = ops.linear_gelu(pixels, self.mix)  # PaCa Eq. 4: gelu(mix(x))
        return self.to_score(pixels)  # PaCa Eq. 5 before its softmax


class MlpClustering(nn.Module):
    """Clustering by a two-layer MLP: scores from the pixel alone, without a grid (PaCa Eq. 6)."""

    def __init__(self, dim: int, num_tokens: int, ratio: float = 4.0):
        super().__init__()
        self.fc = Linear(dim, int(dim * ratio))
        self.to_score = ToScore(int(dim * ratio), num_tokens)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> scores (B, M, N)."""
        return self.to_score(F.gelu(self.fc(to_pixels(features))))  # PaCa Eq. 6 before its softmax


class LinearClustering(nn.Module):
    """Clustering by one linear layer; in the authors' code, not in the paper."""

    def __init__(self, dim: int, num_tokens: int):
        super().__init__()
        self.to_score = ToScore(dim, num_tokens)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> scores (B, M, N)."""
        return self.to_score(to_pixels(features))


class ClusterTokenizer(nn.Module):
    """Group pixels into tokens. Also returns the assignment, which later blocks share, and the scores, for `explain`.

    Args:
        dim: channels of the pixels.
        clustering: module that scores the pixels; None if an external network does (PaCa Sec. 3.2.3).
        norm: False returns the weighted means without LayerNorm, as in the segmentation head.
    """

    def __init__(self, dim: int, clustering: nn.Module | None = None, norm: bool = True):
        super().__init__()
        self.clustering = clustering
        self.norm = TokenNorm(dim) if norm else nn.Identity()

    def forward(self, features: Tensor, scores: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """features (B, C, H, W), scores (B, M, N) of an external network
        -> tokens (B, M, C), assignment (B, M, N), scores (B, M, N)."""
        if self.clustering is not None:
            scores = self.clustering(features)
        if scores is None:
            raise ValueError("expected scores (B, M, N), got None. Pass them, or build with a clustering.")
        assignment = ops.pixel_softmax(scores)  # PaCa Eq. 3: scores.softmax(dim=-1), sums to 1 over pixels
        tokens = self.norm(ops.pool_pixels(assignment, to_pixels(features)))  # PaCa Eq. 2: assignment @ pixels
        return tokens, assignment, scores

    def trace(self, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> AssignmentTrace:
        """The trace of one call of this module."""
        tokens, assignment, scores = output
        height, width = inputs[0].shape[2:]
        return AssignmentTrace(assignment, (height, width), scores, tokens)


class SharedTokenizer(nn.Module):
    """Group pixels by the assignment of an earlier block, with a LayerNorm of its own (PaCa Sec. 3.2.1, stage-wise)."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm = TokenNorm(dim)

    def forward(self, features: Tensor, assignment: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """features (B, C, H, W), assignment (B, M, N) -> tokens (B, M, C), the same assignment."""
        if assignment is None:
            raise ValueError("expected assignment (B, M, N) of an earlier block, got None. Pass it.")
        return self.norm(ops.pool_pixels(assignment, to_pixels(features))), assignment  # PaCa Eq. 2
