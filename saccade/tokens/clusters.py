"""Clusters: pixels grouped into a fixed number of tokens by a learned assignment (PaCa, PACA-04 … PACA-16).

A clustering scores every pixel for every cluster; the softmax runs over the pixels, so a cluster's weights are a
distribution over the image, and its token is the weighted mean of the pixels. Nothing here knows the number of
pixels, so the same weights run at any size. Scores and assignment lie in memory as (B, M, N): both the softmax and
the products with the pixels then read contiguous rows (a fifth faster than (B, N, M) on a CPU at 512 px).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.kernels import allowed, suits
from saccade.kernels.averages import are_fours, averages, averages_twin
from saccade.kernels.pixel_softmax import is_held, pixel_softmax, pixel_softmax_twin
from saccade.layers.depthwise import wide_conv_gelu
from saccade.layers.grid import to_pixels
from saccade.layers.linear import Linear
from saccade.layers.norm import TokenNorm
from saccade.ops._weights import cast_weight
from saccade.ops.linear import linear_gelu
from saccade.tokens.trace import AssignmentTrace


def over_pixels(scores: Tensor) -> Tensor:
    """scores (B, M, N) -> assignment (B, M, N), a distribution over the pixels for every cluster."""
    if not torch.jit.is_scripting():  # noqa: SIM102 (TorchScript skips the branch only when it stands alone)
        if suits(scores) and allowed("pixel_softmax") and is_held(scores):
            return pixel_softmax(scores)
    return pixel_softmax_twin(scores)


def averaged(assignment: Tensor, pixels: Tensor) -> Tensor:
    """assignment (B, M, N), pixels (B, N, C) -> tokens (B, M, C)."""
    if not torch.jit.is_scripting():  # noqa: SIM102 (TorchScript skips the branch only when it stands alone)
        if suits(assignment, pixels) and allowed("averages") and are_fours(assignment, pixels):
            return averages(assignment, pixels)
    return averages_twin(assignment, pixels)


class ToScore(nn.Linear):
    """A linear layer that answers cluster by cluster: pixels (B, N, C) -> scores (B, M, N)."""

    def forward(self, pixels: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if not torch.jit.is_scripting():
            weight, bias = cast_weight(weight), cast_weight(bias)
        weight = weight.expand(pixels.shape[0], -1, -1)  # (B, M, C), one memory
        if bias is None:
            return torch.bmm(weight, pixels.transpose(1, 2))
        return torch.baddbmm(bias.unsqueeze(1), weight, pixels.transpose(1, 2))


class ConvClustering(nn.Module):
    """Scores from a pixel's 7x7 neighbourhood, then two point-wise layers, the last without bias (PACA-06)."""

    def __init__(self, dim: int, num_tokens: int, kernel: int = 7):
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, kernel, padding=kernel // 2, groups=dim)
        self.mix = Linear(dim, dim)
        self.to_score = ToScore(dim, num_tokens, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> scores (B, M, N)."""
        if torch.jit.is_scripting():
            hidden = to_pixels(F.gelu(self.conv(features)))
            return self.to_score(F.gelu(self.mix(hidden)))
        else:
            hidden = to_pixels(wide_conv_gelu(self.conv, features))
            return self.to_score(linear_gelu(hidden, self.mix))


class MlpClustering(nn.Module):
    """Scores from the pixel alone, by a two-layer perceptron: no grid is needed (PACA-07)."""

    def __init__(self, dim: int, num_tokens: int, ratio: float = 4.0):
        super().__init__()
        self.fc = Linear(dim, int(dim * ratio))
        self.to_score = ToScore(int(dim * ratio), num_tokens)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> scores (B, M, N)."""
        return self.to_score(F.gelu(self.fc(to_pixels(features))))


class LinearClustering(nn.Module):
    """Scores by one linear layer (PACA-73)."""

    def __init__(self, dim: int, num_tokens: int):
        super().__init__()
        self.to_score = ToScore(dim, num_tokens)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> scores (B, M, N)."""
        return self.to_score(to_pixels(features))


class ClusterTokenizer(nn.Module):
    """Group pixels into tokens; the assignment comes back for the blocks that share it, the scores for `explain`.

    The scores come from the tokenizer's own `clustering`, or, without one, from outside (an external network).
    `norm=False` leaves the tokens the weighted means they are, as the segmentation head does.
    """

    def __init__(self, dim: int, clustering: nn.Module | None = None, norm: bool = True):
        super().__init__()
        self.clustering = clustering
        self.norm = TokenNorm(dim) if norm else nn.Identity()

    def forward(self, features: Tensor, scores: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """features (B, C, H, W), scores (B, M, N) if they are given
        -> tokens (B, M, C), assignment (B, M, N) summing to 1 over pixels, scores (B, M, N)."""
        if self.clustering is not None:
            scores = self.clustering(features)
        if scores is None:
            raise ValueError("this tokenizer has no clustering of its own: call it with scores (B, M, N).")
        assignment = over_pixels(scores)
        return self.norm(averaged(assignment, to_pixels(features))), assignment, scores

    def trace(self, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> AssignmentTrace:
        """What one call of this module says about pixels and tokens."""
        tokens, assignment, scores = output
        height, width = inputs[0].shape[2:]
        return AssignmentTrace(assignment, (height, width), scores, tokens)


class SharedTokenizer(nn.Module):
    """Group pixels by the assignment of an earlier block; only the norm is this block's own (PACA-10)."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm = TokenNorm(dim)

    def forward(self, features: Tensor, assignment: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """features (B, C, H, W), assignment (B, M, N) -> tokens (B, M, C), the same assignment."""
        if assignment is None:
            raise ValueError("no earlier block made an assignment to share; call it with assignment (B, M, N).")
        return self.norm(averaged(assignment, to_pixels(features))), assignment
