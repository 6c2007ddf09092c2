"""VT-FPN: the levels of a pyramid talk through a few visual tokens instead of convolutions (VT-64 … VT-69, VTR-13).

group     tokens.visual_tokens.FilterTokenizer, one a level
relate    layers.relation.VisualTokenTransformer, one over the tokens of all levels
put back  tokens.projector.TokenProjector, one a level

The paper says 8 tokens a level; its 8.5 GFLOPs at 800 x 1216 are those of 16, 16, 8 and 8 (`num_tokens`). One such
layer by default; in further ones, recurrent tokenizers ask with the previous layer's tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from saccade.heads.fpn import FPNHead
from saccade.layers.relation import VisualTokenTransformer
from saccade.tokens.projector import TokenProjector
from saccade.tokens.visual_tokens import FilterTokenizer, RecurrentTokenizer, pixel_groups


class VTPyramidLayer(nn.Module):
    """Group every level, relate the tokens of all, put them back on every level."""

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
        """maps (B, C_i, H_i, W_i), previous tokens (B, M_i, D) -> maps (B, dim, H_i, W_i), tokens (B, M_i, D)."""
        previous = tokens or [None] * len(pyramid)
        grouped = [group(*seen)[0] for group, *seen in zip(self.tokenizers, pyramid, previous, strict=True)]
        related = list(self.relation(torch.cat(grouped, dim=1)).split(self.num_tokens, dim=1))
        put_back = zip(self.projectors, pyramid, related, strict=True)
        return [project(features, own) for project, features, own in put_back], related


class VTPyramid(nn.Module):
    """A drop-in for FPN: the same maps in, the same shapes out (VT-67).

    Args:
        dim: channels of the maps that come out.
        token_dim: width of the tokens.
        num_tokens: tokens of a level, one number or one a level.
        num_heads: of all attention.
        layers: how many times the levels talk.
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
            raise ValueError(f"num_tokens must be one number or {len(channels)}, one a level; got {num_tokens!r}.")
        self.layers = nn.ModuleList(
            VTPyramidLayer([dim] * len(channels) if i else channels, dim, token_dim, counts, num_heads, first=i == 0)
            for i in range(layers)
        )

    def forward(self, pyramid: list[Tensor]) -> list[Tensor]:
        """maps (B, C_i, H_i, W_i), fine to coarse -> maps (B, dim, H_i, W_i)."""
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
    **neck: object,
) -> FPNHead:
    """The semantic FPN with its neck exchanged; `neck` are the options of `VTPyramid`."""
    return FPNHead(channels, num_classes, VTPyramid(channels, dim, **neck), dim, branch_dim, groups, dropout)
