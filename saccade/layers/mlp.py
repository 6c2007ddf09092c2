"""The feed-forward part of a block, with or without a depth-wise convolution inside."""

import torch.nn.functional as F
from torch import Tensor, nn


class ConvMlp(nn.Module):
    """Widen, look at the 3x3 neighbourhood of every hidden channel, narrow again.

    SViT activates before the depth-wise convolution, PaCa after it (`act_first`). `conv=False` is the plain
    two-layer perceptron, `shortcut=False` drops the sum around the convolution, `sub_norm` normalises the hidden layer
    before it is narrowed (Sub-LN, arXiv 2210.06423).
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        act_first: bool = True,
        conv: bool = True,
        shortcut: bool = True,
        drop: float = 0.0,
        sub_norm: bool = False,
    ):
        super().__init__()
        self.act_first = act_first
        self.shortcut = shortcut
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.conv = nn.Conv2d(hidden_dim, hidden_dim, 3, padding=1, groups=hidden_dim) if conv else None
        self.drop1 = nn.Dropout(drop)
        self.norm = nn.LayerNorm(hidden_dim, eps=1e-6) if sub_norm else nn.Identity()
        self.fc2 = nn.Linear(hidden_dim, dim)
        self.drop2 = nn.Dropout(drop)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> features (B, C, H, W); channels-last in memory, so every permute is a view."""
        hidden = self.fc1(features.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # (B, hidden, H, W)
        if self.act_first:
            hidden = self.drop1(F.gelu(hidden))
        if self.conv is not None:
            hidden = hidden + self.conv(hidden) if self.shortcut else self.conv(hidden)
        if not self.act_first:
            hidden = self.drop1(F.gelu(hidden))
        return self.drop2(self.fc2(self.norm(hidden.permute(0, 2, 3, 1)))).permute(0, 3, 1, 2)
