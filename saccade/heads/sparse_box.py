"""SparseFormer's detection head (arXiv 2304.03768, appendix A.1): a class and a box per token."""

import torch
from torch import Tensor, nn

from saccade.layers.boxes import adjust


class SparseBoxHead(nn.Module):
    """Linear classifier and two-layer box refinement on the first `count` tokens.

    The box is the token's region, adjusted once more. The last layer starts at zero, so that boxes start as regions.
    """

    def __init__(self, dim: int, num_classes: int, count: int = 100):
        super().__init__()
        self.count = count
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.to_class = nn.Linear(dim, num_classes + 1)
        last = nn.Linear(dim, 4)
        self.to_delta = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), last)
        nn.init.normal_(self.to_class.weight, std=0.02)
        nn.init.zeros_(self.to_class.bias)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, tokens: Tensor, regions: Tensor) -> tuple[Tensor, Tensor]:
        """tokens (B, M, D), regions (B, M, 4) -> logits (B, P, K + 1), class 0 for no object, boxes (B, P, 4)."""
        tokens, regions = self.norm(tokens[:, : self.count]), regions[:, : self.count]
        logits, deltas = self.to_class(tokens), self.to_delta(tokens)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)), adjust(regions, deltas.to(regions.dtype))
