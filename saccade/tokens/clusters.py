"""Clusters: pixels grouped into a fixed number of tokens by a learned assignment (PaCa Sec. 3.2).

A clustering scores every pixel for every token. The softmax runs over the pixels, so a token's weights are a
distribution over the image, and the token is the weighted mean of the pixels. No parameter depends on the number of
pixels: the same weights run at any size. Scores and assignment are (B, M, N) in memory: the softmax and the products
with the pixels then read contiguous rows (a fifth faster than (B, N, M) on a CPU at 512 px).

`MlpClustering` and `LinearClustering` need no grid: features may be (B, C, H, W) or a sequence (B, N, C). On sequences
this is the paper's token-to-cluster attention, `TokenToClusterAttention`. Spatial reduction (PaCa Fig. 2a), to which
the paper compares its clusters, is in `StridedTokenizer` and `PooledTokenizer`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade import ops
from saccade.layers.attention import CrossAttention
from saccade.layers.grid import to_pixels
from saccade.layers.linear import Linear
from saccade.layers.norm import TokenNorm
from saccade.tokens.trace import AssignmentTrace
from saccade.tokens.visual_tokens import AssignmentTokenizer, cell_weights


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
        """features (B, C, H, W) or a sequence (B, N, C) -> scores (B, M, N)."""
        return self.to_score(F.gelu(self.fc(to_sequence(features))))  # PaCa Eq. 6 before its softmax


class LinearClustering(nn.Module):
    """Clustering by one linear layer; in the authors' code, not in the paper.

    Without bias, as there; the softmax over pixels would ignore it.
    """

    def __init__(self, dim: int, num_tokens: int):
        super().__init__()
        self.to_score = ToScore(dim, num_tokens, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) or a sequence (B, N, C) -> scores (B, M, N)."""
        return self.to_score(to_sequence(features))


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
        """features (B, C, H, W) or a sequence (B, N, C), scores (B, M, N) of an external network
        -> tokens (B, M, C), assignment (B, M, N), scores (B, M, N)."""
        if self.clustering is not None:
            scores = self.clustering(features)
        if scores is None:
            raise ValueError("expected scores (B, M, N), got None. Pass them, or build with a clustering.")
        assignment = scores.softmax(dim=-1, dtype=scores.dtype)  # PaCa Eq. 3: sums to 1 over pixels
        tokens = self.norm(assignment @ to_sequence(features))  # PaCa Eq. 2
        return tokens, assignment, scores

    def trace(self, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> AssignmentTrace:
        """The trace of one call of this module."""
        tokens, assignment, scores = output
        height, width = inputs[0].shape[2:] if inputs[0].ndim == 4 else (1, inputs[0].shape[1])
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
        return self.norm(assignment @ to_pixels(features)), assignment  # PaCa Eq. 2


class TokenToClusterAttention(nn.Module):
    """Attention from a sequence to clusters of itself: PaCa Eqs. 1-3 and 6 without a grid (token-to-cluster, Sec. 5).

    Takes the place of self-attention in any transformer on sequences, at a cost linear in their length.
    """

    def __init__(self, dim: int, num_heads: int, num_tokens: int = 100, ratio: float = 4.0):
        super().__init__()
        self.tokenizer = ClusterTokenizer(dim, MlpClustering(dim, num_tokens, ratio))
        self.attn = CrossAttention(dim, num_heads)

    def forward(self, sequence: Tensor) -> Tensor:
        """sequence (B, N, C) -> (B, N, C)."""
        return self.attn(sequence, self.tokenizer(sequence)[0])


class StridedTokenizer(nn.Module):
    """Spatial reduction by a convolution of kernel and stride `stride`, then LayerNorm: the tokens of PVT.

    One token per cell, so their number grows with the image (PaCa Fig. 2a).
    """

    def __init__(self, dim: int, stride: int):
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, stride, stride)
        self.norm = TokenNorm(dim)

    def forward(self, features: Tensor, link: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """features (B, C, H, W), any link -> tokens (B, M, C), the same link. Edges are padded to whole cells."""
        stride = self.conv.stride[0]
        features = F.pad(features, (0, -features.shape[3] % stride, 0, -features.shape[2] % stride))
        return self.norm(to_pixels(self.conv(features))), link


class PooledTokenizer(AssignmentTokenizer):
    """Spatial reduction by average pooling to a grid of `side` x `side` cells, then LayerNorm: as in PVTv2-Linear."""

    def __init__(self, dim: int, side: int):
        super().__init__()
        self.side = side
        self.norm = TokenNorm(dim)

    def forward(self, features: Tensor, link: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """features (B, C, H, W), any link -> tokens (B, M, C), assignment (B, M, N)."""
        assignment = cell_weights(features, (self.side, self.side)).expand(features.shape[0], -1, -1)
        return self.norm(torch.matmul(assignment, to_pixels(features))), assignment


def to_sequence(features: Tensor) -> Tensor:
    """features (B, C, H, W) -> (B, N, C); a sequence (B, N, C) is unchanged."""
    return features if features.ndim == 3 else to_pixels(features)
