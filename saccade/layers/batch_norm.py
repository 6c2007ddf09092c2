"""What a batch norm with fixed statistics computes."""

import torch
from torch import Tensor, nn

from saccade.ops import plain_layer


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
