"""VT-FPN (arXiv 2006.03677, Sec. 4 and Fig. 4): pyramid levels exchange information through visual tokens.

group     tokens.visual_tokens.FilterTokenizer         Eq. 1, one per level; RecurrentTokenizer in further layers, Eq. 2
relate    layers.relation.VisualTokenTransformer             Eqs. 3-4, one over the tokens of all levels
put back  tokens.projector.TokenProjector              Eq. 5, one per level

This is the module that the authors released (in the early history of the repository d2go), and its weights load:
batch norm on the scores of filters, no activation in the transformer, which has 16 heads there. Its defaults are 3
layers with 16, 16, 8 and 8 tokens. Sec. 4 says 8 tokens per level and one transformer, which are the defaults here; the
8.5 GFLOPs of Table 9 at 800 x 1216 are those of one layer with 16, 16, 8 and 8.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from saccade.heads.fpn import FPNHead
from saccade.layers.relation import VisualTokenTransformer
from saccade.tokens.projector import TokenProjector
from saccade.tokens.visual_tokens import FilterTokenizer, PositionEncoding, RecurrentTokenizer, pixel_groups


class VTPyramidLayer(nn.Module):
    """Group every level into tokens, relate the tokens of all levels, project them back onto every level."""

    def __init__(
        self,
        channels: Sequence[int],
        dim: int,
        token_dim: int,
        num_tokens: Sequence[int],
        num_heads: int,
        first: bool,
        positions: Sequence[tuple[int, int]] | None = None,
    ):
        super().__init__()

        def tokenizer(level: int) -> nn.Module:
            width, position = channels[level], None
            if positions is not None:
                position = PositionEncoding(1 if first else num_heads, *positions[level])
            if not first:
                return RecurrentTokenizer(width, token_dim, num_heads, position=position)
            groups = pixel_groups(width, num_heads)
            return FilterTokenizer(width, token_dim, num_tokens[level], groups, score_norm=True, position=position)

        self.num_tokens = list(num_tokens)
        self.tokenizers = nn.ModuleList(map(tokenizer, range(len(channels))))
        self.relation = VisualTokenTransformer(token_dim, num_heads, relu=False)
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
        positions: per level the (size, halvings) of a `PositionEncoding` of its tokens; None for no encoding.
    """

    def __init__(
        self,
        channels: Sequence[int],
        dim: int = 256,
        token_dim: int = 1024,
        num_tokens: int | Sequence[int] = 8,
        num_heads: int = 16,
        layers: int = 1,
        positions: Sequence[tuple[int, int]] | None = None,
    ):
        super().__init__()
        counts = [num_tokens] * len(channels) if isinstance(num_tokens, int) else list(num_tokens)
        if len(counts) != len(channels):
            raise ValueError(f"num_tokens must be one number or {len(channels)}, one per level; got {num_tokens!r}.")
        if positions is not None and len(positions) != len(channels):
            raise ValueError(f"positions must be {len(channels)} pairs, one per level; got {positions!r}.")
        widths = [list(channels)] + [[dim] * len(channels)] * (layers - 1)
        self.layers = nn.ModuleList(
            VTPyramidLayer(inputs, dim, token_dim, counts, num_heads, i == 0, positions)
            for i, inputs in enumerate(widths)
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
