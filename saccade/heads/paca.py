"""PaCa segmentation head (arXiv 2203.11987, Sec. 3.4, Eqs. 9-14): pixels attend to clusters, one cluster per class.

group     tokens.clusters.ClusterTokenizer                            Eqs. 9 and 11
relate    torch.nn.functional.scaled_dot_product_attention            Eqs. 12-13, one head, scores not scaled
put back  the same cross-attention: pixels are the queries            Eqs. 10 and 13

The scores before the softmax of Eq. 9 are themselves a segmentation: `Segmenter` adds a cross-entropy on them with
weight 0.4, which ties each cluster to its class.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.heads.classifier import PixelClassifier
from saccade.layers.conv import ConvNormRelu, resize_like
from saccade.layers.grid import to_features, to_pixels
from saccade.layers.linear import ListNorm
from saccade.tokens.clusters import ClusterTokenizer, ToScore


class ClassClustering(nn.Module):
    """Score of every pixel for every class: PaCa Eq. 9 without its softmax."""

    def __init__(self, in_dim: int, dim: int, num_classes: int):
        super().__init__()
        self.mix = ConvNormRelu(in_dim, dim)
        self.to_score = ToScore(dim, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> scores (B, K, N)."""
        return self.to_score(to_pixels(self.mix(features)))


class LinearBlock(nn.Module):
    """Linear layer, BatchNorm over the channels, ReLU: the LinearBlock of PaCa Eq. 12."""

    def __init__(self, in_dim: int, dim: int):
        super().__init__()
        self.fc = nn.Linear(in_dim, dim)
        self.norm = ListNorm(dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, M, C) -> (B, M, D)."""
        return F.relu(self.norm(self.fc(tokens)))


class PaCaHead(nn.Module):
    """Map all levels to one width and the finest size, group pixels by class, let pixels attend to the classes."""

    def __init__(self, channels: Sequence[int], num_classes: int, dim: int = 256, dropout: float = 0.1):
        super().__init__()
        concat_dim = dim * len(channels)
        self.levels = nn.ModuleList(ConvNormRelu(width, dim) for width in channels)
        self.tokenizer = ClusterTokenizer(concat_dim, ClassClustering(concat_dim, dim, num_classes), norm=False)
        self.to_query = ConvNormRelu(concat_dim, dim)
        self.to_key = LinearBlock(concat_dim, dim)
        self.to_value = LinearBlock(concat_dim, dim)
        self.mix = ConvNormRelu(dim, dim)
        self.classifier = PixelClassifier(dim, num_classes, dropout)

    def forward(self, pyramid: list[Tensor]) -> tuple[Tensor, Tensor]:
        """features (B, C_i, H_i, W_i), fine to coarse -> logits and cluster scores, both (B, K, H_0, W_0)."""
        levels = [level(features) for level, features in zip(self.levels, pyramid, strict=True)]
        features = torch.cat([levels[0], *(resize_like(coarse, levels[0]) for coarse in levels[1:])], dim=1)
        height, width = features.shape[2], features.shape[3]
        tokens, _, scores = self.tokenizer(features)  # Eqs. 9 and 11
        query = to_pixels(self.to_query(features))  # (B, N, D), Eq. 10
        key, value = self.to_key(tokens), self.to_value(tokens)  # (B, K, D), Eq. 12
        attended = F.scaled_dot_product_attention(query, key, value, scale=1.0)  # (B, N, D), Eq. 13
        logits = self.classifier(self.mix(to_features(attended, height, width)))  # Eqs. 13-14
        return logits, scores.unflatten(2, (height, width))
