"""Pixels to tokens and back, one mechanism per file, with the papers' equations in plain PyTorch.

| family | group | relate | put back | link |
|---|---|---|---|---|
| VT | `visual_tokens` | `layers.relation` | `projector` | assignment (B, M, N) |
| PaCa | `clusters`, once per stage | `layers.attention.CrossAttention` | the same attention | assignment (B, M, N) |
| SViT | `super_tokens.group` | `layers.attention.SelfAttention` | `super_tokens.spread` | association (B, N, 9) |
| SparseFormer | `regions` | `layers.attention.SelfAttention` | `locate` | regions (B, M, 4), points (B, M, P, 2) |

Every tokenizer returns its tokens first and has a method `trace`, which turns the inputs and outputs of one call into a
tuple of `trace`. `saccade.record` calls it through hooks.
"""

from typing import TYPE_CHECKING

from saccade._extras import lazy_imports

if TYPE_CHECKING:
    from saccade.tokens.clusters import TokenToClusterAttention
    from saccade.tokens.trace import AssignmentTrace, AssociationTrace, RegionTrace
    from saccade.tokens.visual_tokens import TOKENIZERS

__all__ = [
    "TOKENIZERS",
    "AssignmentTrace",
    "AssociationTrace",
    "RegionTrace",
    "TokenToClusterAttention",
]

__getattr__ = lazy_imports(__name__)
