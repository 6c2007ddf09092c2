"""LayerNorm over the channels of tokens and of features, in the dtype of its input."""

from torch import Tensor, nn

from saccade.ops import plain_layer
from saccade.ops.layer_norm import channel_norm, layer_norm


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
    """LayerNorm over the channels of features; fused operations know it by `over_channels`."""

    over_channels = True

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> features (B, C, H, W)."""
        return channel_norm(features, self.weight, self.bias, self.eps)
