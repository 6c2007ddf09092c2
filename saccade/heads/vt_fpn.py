"""VT-FPN (arXiv 2006.03677, Sec. 4 and Fig. 4): pyramid levels exchange information through visual tokens.

group     tokens.visual_tokens.FilterTokenizer         Eq. 1, one per level; RecurrentTokenizer in further layers, Eq. 2
relate    layers.relation.VisualTokenTransformer             Eqs. 3-4, one over the tokens of all levels
put back  tokens.projector.TokenProjector              Eq. 5, one per level

Sec. 4 says 8 tokens per level; the 8.5 GFLOPs of Table 9 at 800 x 1216 are those of 16, 16, 8 and 8 (`num_tokens`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from saccade.heads.fpn import FPNHead
from saccade.layers.relation import VisualTokenTransformer
from saccade.tokens.projector import TokenProjector
from saccade.tokens.visual_tokens import FilterTokenizer, RecurrentTokenizer, pixel_groups


class VTPyramidLayer(nn.Module):
    """Group every level into tokens, relate the tokens of all levels, project them back onto every level."""

    def __init__(
        self, channels: Sequence[int], dim: int, token_dim: int, num_tokens: Sequence[int], num_heads: int, first: bool
    ):
        super().__init__()

        def tokenizer(width: int, count: int) -> nn.Module:
            if first:
                return FilterTokenizer(width, token_dim, count, value_groups=pixel_groups(width, num_heads))
            return RecurrentTokenizer(width, token_dim, num_heads)

        self.num_tokens = list(num_tokens)
        self.tokenizers = nn.ModuleList(map(tokenizer, channels, num_tokens))
        self.relation = VisualTokenTransformer(token_dim, num_heads)
        self.projectors = nn.ModuleList(TokenProjector(width, dim, token_dim, num_heads) for width in channels)

    def forward(self, pyramid: list[Tensor], tokens: list[Tensor] | None) -> tuple[list[Tensor], list[Tensor]]:
        """features (B, C_i, H_i, W_i), previous tokens (B, M_i, D) -> features (B, dim, H_i, W_i), tokens."""
        previous = tokens or [None] * len(pyramid)
        grouped = [
            tokenizer(features, prior)[0]
            for tokenizer, features, prior in zip(self.tokenizers, pyramid, previous, strict=True)
        ]
        related = list(self.relation(torch.cat(grouped, dim=1)).split(self.num_tokens, dim=1))
        projected = [
            projector(features, level_tokens)
            for projector, features, level_tokens in zip(self.projectors, pyramid, related, strict=True)
        ]
        return projected, related


class VTPyramid(nn.Module):
    """Drop-in replacement of the FPN neck: same inputs, same output shapes.

    Args:
        dim: channels of the output maps.
        token_dim: width of the tokens.
        num_tokens: tokens per level, one number or one per level.
        num_heads: heads of every attention.
        layers: number of `VTPyramidLayer`s. Further layers attend with the tokens of the previous one.
    """

    def __init__(
        self,
        channels: Sequence[int],
        dim: int = 256,
        token_dim: int = 1024,
        num_tokens: int | Sequence[int] = 8,
        num_heads: int = 16,
        layers: int = 1,
    ):
        super().__init__()
        counts = [num_tokens] * len(channels) if isinstance(num_tokens, int) else list(num_tokens)
        if len(counts) != len(channels):
            raise ValueError(f"num_tokens must be one number or {len(channels)}, one per level; got {num_tokens!r}.")
        self.layers = nn.ModuleList(
            VTPyramidLayer([dim] * len(channels) if i else channels, dim, token_dim, counts, num_heads, first=i == 0)
            for i in range(layers)
        )

    def forward(self, pyramid: list[Tensor]) -> list[Tensor]:
        """features (B, C_i, H_i, W_i), fine to coarse -> features (B, dim, H_i, W_i)."""
        tokens = None
        for layer in self.layers:
            pyramid, tokens = layer(pyramid, tokens)
        return pyramid


def vt_fpn_head(
    channels: Sequence[int],
    num_classes: int,
    dim: int = 256,
    branch_dim: int = 128,
    groups: int = 0,
    dropout: float = 0.0,
    **neck: Any,
) -> FPNHead:
    """Semantic FPN with `VTPyramid` as neck; `neck` are the options of `VTPyramid`."""
    return FPNHead(channels, num_classes, VTPyramid(channels, dim, **neck), dim, branch_dim, groups, dropout)
