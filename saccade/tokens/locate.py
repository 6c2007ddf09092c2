"""From tokens back to dense features by location (SparseFormer Appendix A.2).

Every pixel attends to the tokens. The location bias of a token falls with the squared distance of the pixel from the
centre of the token's region, measured in sizes of the region: large regions reach far. `LocationAttention` adds learned
queries and keys; `locate` uses the location alone and needs no training.
"""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.layers.boxes import centre_and_size
from saccade.layers.grid import to_features, to_pixels

MIN_SIZE = 1e-4  # of a region, as a fraction of the image; smaller regions count as this large


class LocationAttention(nn.Module):
    """Cross-attention from pixels to tokens, softmax(Q Kᵀ / √d + bias) V, with one head.

    It is initialised close to location alone: small queries and keys, and values that are the tokens themselves.
    """

    def __init__(self, pixel_dim: int, token_dim: int):
        super().__init__()
        self.to_query = nn.Linear(pixel_dim, token_dim)
        self.to_key = nn.Linear(token_dim, token_dim)
        self.to_value = nn.Linear(token_dim, token_dim)
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.normal_(self.to_query.weight, std=0.02)
        nn.init.normal_(self.to_key.weight, std=0.02)
        nn.init.eye_(self.to_value.weight)
        for layer in (self.to_query, self.to_key, self.to_value):
            nn.init.zeros_(layer.bias)

    def train(self, mode: bool = True) -> "LocationAttention":
        """Warn when untrained layers are about to be evaluated: two models would give different features."""
        if not mode and not self.to_value.weight.is_meta and self._is_untrained():
            warnings.warn(
                "the dense features of this SparseFormer are not trained (dense=True). Train them, load a checkpoint "
                "that has locate.*, or use dense=False.",
                stacklevel=2,
            )
        return super().train(mode)

    def _is_untrained(self) -> bool:
        weight, biases = self.to_value.weight, (self.to_query.bias, self.to_value.bias)
        return torch.equal(weight, torch.eye(*weight.shape).to(weight)) and not any(bias.any() for bias in biases)

    def forward(self, features: Tensor, tokens: Tensor, regions: Tensor) -> Tensor:
        """features (B, C, H, W), tokens (B, M, D), regions (B, M, 4) -> features (B, D, H, W)."""
        height, width = features.shape[2], features.shape[3]
        query, key, value = self.to_query(to_pixels(features)), self.to_key(tokens), self.to_value(tokens)
        bias = _within_float16(location_bias(regions, height, width)).to(query.dtype)
        return to_features(F.scaled_dot_product_attention(query, key, value, attn_mask=bias), height, width)


def locate(tokens: Tensor, regions: Tensor, height: int, width: int) -> Tensor:
    """tokens (B, M, D), regions (B, M, 4) -> features (B, D, H, W): the mean of the tokens, weighted by location."""
    weights = location_bias(regions, height, width).softmax(-1).to(tokens.dtype)  # (B, N, M), sums to 1 over tokens
    return to_features(torch.matmul(weights, tokens), height, width)


def location_bias(regions: Tensor, height: int, width: int) -> Tensor:
    """regions (B, M, 4) -> (B, N, M): minus the squared distance of a pixel from a region's centre, in its sizes."""
    centre, size = centre_and_size(regions)  # (B, M, 2) each
    size = size.abs().clamp(min=MIN_SIZE)
    x = (torch.arange(width, device=regions.device, dtype=regions.dtype) + 0.5) / width
    y = (torch.arange(height, device=regions.device, dtype=regions.dtype) + 0.5) / height
    dx2 = ((x[:, None] - centre[:, None, :, 0]) / size[:, None, :, 0]).square()  # (B, W, M)
    dy2 = ((y[:, None] - centre[:, None, :, 1]) / size[:, None, :, 1]).square()  # (B, H, M)
    return -(dy2.unsqueeze(2) + dx2.unsqueeze(1)).flatten(1, 2)


def _within_float16(bias: Tensor) -> Tensor:
    """A bias with the same softmax within the range of float16: 0 for the nearest token of every pixel."""
    return (bias - bias.amax(-1, keepdim=True)).clamp(min=-1e4)
