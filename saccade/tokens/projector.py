"""Put visual tokens back onto the pixels: attention from every pixel to the tokens (VT Eq. 5)."""

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from saccade.layers.grid import to_features, to_pixels
from saccade.layers.linear import Linear, LinearNorm, ListNorm, pixel_linear
from saccade.ops.attention import cross_attention
from saccade.tokens.visual_tokens import pixel_groups


class TokenProjector(nn.Module):
    """pixels + norm(softmax over tokens (query @ key.T) @ value).

    Pixels and values are mapped to `dim` channels where their widths differ (Eq. 5 adds the tokens themselves, which
    needs equal widths). The map of the values has no norm: weights sum to 1, so the last norm would undo it. The gain
    of the last norm starts at zero, so that an untrained projector adds nothing.
    """

    def __init__(
        self,
        pixel_dim: int,
        dim: int,
        token_dim: int,
        num_heads: int = 16,
        scale: bool = True,
        norm: bool = True,
        drop_path: float = 0.0,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5 if scale else 1.0
        self.widen = pixel_linear(pixel_dim, dim, norm=norm) if pixel_dim != dim else nn.Identity()
        self.to_query = pixel_linear(dim, dim, pixel_groups(dim, num_heads), norm)
        self.to_key = LinearNorm(token_dim, dim, norm=norm)
        self.to_value = Linear(token_dim, dim, bias=False) if token_dim != dim else nn.Identity()
        self.norm = ListNorm(dim, zero=True, enabled=norm)
        self.drop_path = DropPath(drop_path)

    def forward(self, features: Tensor, tokens: Tensor) -> Tensor:
        """features (B, C, H, W), tokens (B, M, D) -> features (B, dim, H, W), channels-last in memory."""
        pixels = self.widen(to_pixels(features))
        query = self.to_query(pixels)  # (B, N, dim)
        key, value = self.to_key(tokens), self.to_value(tokens)  # (B, M, dim)
        if not self.norm.bn.training:  # then the norm is affine, and commutes with a mean whose weights sum to 1
            value = self.norm(value)
        key_value = torch.cat((key, value), dim=2)
        # VT Eq. 5: softmax over tokens (query @ key.T) @ value
        mixed = cross_attention(query, key_value, self.num_heads, self.scale)  # (B, N, dim)
        if self.norm.bn.training:
            mixed = self.norm(mixed)
        return to_features(pixels + self.drop_path(mixed), features.shape[2], features.shape[3])
