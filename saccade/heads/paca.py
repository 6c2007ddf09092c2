"""PaCa head: pixels ask clusters, and the clusters are the classes (Eq. 9-14, PACA-47 … PACA-52).

group     tokens.clusters.ClusterTokenizer, one cluster a class
relate    a pixel attends to the clusters, one head, scores not scaled
put back  the same step

The scores before the softmax are a segmentation of their own; a second loss on them (weight 0.4) teaches each cluster
its class.
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
    """How much a pixel speaks for every class (Eq. 9)."""

    def __init__(self, in_dim: int, dim: int, num_classes: int):
        super().__init__()
        self.mix = ConvNormRelu(in_dim, dim)
        self.to_score = ToScore(dim, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> scores (B, K, N)."""
        return self.to_score(to_pixels(self.mix(features)))


class TokenMap(nn.Module):
    """Linear map, BatchNorm over the channels, ReLU (Eq. 12)."""

    def __init__(self, in_dim: int, dim: int):
        super().__init__()
        self.fc = nn.Linear(in_dim, dim)
        self.norm = ListNorm(dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, M, C) -> (B, M, D)."""
        return F.relu(self.norm(self.fc(tokens)))


class PaCaHead(nn.Module):
    """Levels to one width and size, one cluster a class, pixels attend to the clusters."""

    def __init__(self, channels: Sequence[int], num_classes: int, dim: int = 256, dropout: float = 0.1):
        super().__init__()
        wide = dim * len(channels)
        self.levels = nn.ModuleList(ConvNormRelu(width, dim) for width in channels)
        self.tokenizer = ClusterTokenizer(wide, ClassClustering(wide, dim, num_classes), norm=False)
        self.to_query = ConvNormRelu(wide, dim)
        self.to_key = TokenMap(wide, dim)
        self.to_value = TokenMap(wide, dim)
        self.mix = ConvNormRelu(dim, dim)
        self.classifier = PixelClassifier(dim, num_classes, dropout)

    def forward(self, pyramid: list[Tensor]) -> tuple[Tensor, Tensor]:
        """maps (B, C_i, H_i, W_i), fine to coarse -> logits (B, K, H_0, W_0), and the clusters' scores as such."""
        levels = [level(features) for level, features in zip(self.levels, pyramid, strict=True)]
        features = torch.cat([levels[0], *(resize_like(coarse, levels[0]) for coarse in levels[1:])], dim=1)
        height, width = features.shape[2], features.shape[3]
        tokens, _, scores = self.tokenizer(features)  # group
        query, key, value = to_pixels(self.to_query(features)), self.to_key(tokens), self.to_value(tokens)
        asked = F.scaled_dot_product_attention(query, key, value, scale=1.0)  # relate, and put back
        logits = self.classifier(self.mix(to_features(asked, height, width)))
        return logits, scores.unflatten(2, (height, width))
