"""From tokens back to a dense map, by location: every pixel asks the tokens, the nearer the better (SF-71, SF-72).

The score of a token at a pixel falls with the squared distance from the centre of its region, counted in sizes of the
region: broad regions reach far. `LocationAttention` adds what the pixel and the token say of each other, by learned
projections (appendix A.2 of the paper); `locate` is location alone, and needs no training.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.layers.boxes import centre_and_size
from saccade.layers.grid import to_features, to_pixels

SMALLEST = 1e-4  # side of a region, in images, below which nothing gets sharper


class LocationAttention(nn.Module):
    """Cross-attention from pixels to tokens, softmax(q kᵀ / √d + location) v; one head.

    It starts close to location alone: small queries and keys, and values that are the tokens themselves.
    """

    def __init__(self, pixel_dim: int, token_dim: int):
        super().__init__()
        self.to_query = nn.Linear(pixel_dim, token_dim)
        self.to_key = nn.Linear(token_dim, token_dim)
        self.to_value = nn.Linear(token_dim, token_dim)
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.trunc_normal_(self.to_query.weight, std=0.02)
        nn.init.trunc_normal_(self.to_key.weight, std=0.02)
        nn.init.eye_(self.to_value.weight)
        for layer in (self.to_query, self.to_key, self.to_value):
            nn.init.zeros_(layer.bias)

    def forward(self, features: Tensor, tokens: Tensor, regions: Tensor) -> Tensor:
        """features (B, C, H, W), tokens (B, M, D), regions (B, M, 4) -> features (B, D, H, W)."""
        height, width = features.shape[2], features.shape[3]
        query, key, value = self.to_query(to_pixels(features)), self.to_key(tokens), self.to_value(tokens)
        bias = _safe(location_bias(regions, height, width)).to(query.dtype)
        return to_features(F.scaled_dot_product_attention(query, key, value, attn_mask=bias), height, width)


def locate(tokens: Tensor, regions: Tensor, height: int, width: int) -> Tensor:
    """tokens (B, M, D), regions (B, M, 4) -> features (B, D, H, W): the tokens where they look, blended by location."""
    share = location_bias(regions, height, width).softmax(-1).to(tokens.dtype)  # (B, N, M)
    return to_features(torch.matmul(share, tokens), height, width)


def location_bias(regions: Tensor, height: int, width: int) -> Tensor:
    """regions (B, M, 4) -> (B, N, M): minus the squared distance of a pixel from a region's centre, in its sizes."""
    centre, size = centre_and_size(regions)  # (B, M, 2) each
    size = size.abs().clamp(min=SMALLEST)
    x = (torch.arange(width, device=regions.device, dtype=regions.dtype) + 0.5) / width
    y = (torch.arange(height, device=regions.device, dtype=regions.dtype) + 0.5) / height
    across = ((x[:, None] - centre[:, None, :, 0]) / size[:, None, :, 0]).square()  # (B, W, M)
    down = ((y[:, None] - centre[:, None, :, 1]) / size[:, None, :, 1]).square()  # (B, H, M)
    return -(down.unsqueeze(2) + across.unsqueeze(1)).flatten(1, 2)


def _safe(bias: Tensor) -> Tensor:
    """The same softmax within the range of float16: 0 for the nearest token of every pixel, no infinity."""
    return (bias - bias.amax(-1, keepdim=True)).clamp(min=-1e4)
