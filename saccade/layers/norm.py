"""LayerNorm over the channels of tokens and of features, in the dtype of its input; what folding leaves of a norm."""

import torch
from torch import Tensor, nn

from saccade.ops import plain_layer
from saccade.ops.layer_norm import layer_norm


@plain_layer
class TokenNorm(nn.LayerNorm):
    """LayerNorm over the last axis."""

    over_channels = False

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__(dim, eps=eps)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (..., D) -> tokens (..., D)."""
        return layer_norm(tokens, self.weight, self.bias, self.eps)


@plain_layer
class ChannelNorm(TokenNorm):
    """LayerNorm over the channels of features; fused operations identify it by `over_channels`."""

    over_channels = True

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> features (B, C, H, W)."""
        return super().forward(features.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # a view where channels-last


@plain_layer
class ChannelAffine(nn.Module):
    """gain * x + shift per channel of features (B, C, ...) or vectors (B, C): what folding leaves of a batch norm."""

    def __init__(self, gain: Tensor, shift: Tensor, axes: int):
        super().__init__()
        shape = (-1, *(1,) * axes)
        self.gain = nn.Parameter(gain.view(shape), requires_grad=False)
        self.shift = nn.Parameter(shift.view(shape), requires_grad=False)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, ...) -> features (B, C, ...)."""
        return torch.addcmul(self.shift, features, self.gain)
