"""Put visual tokens back: every pixel asks the tokens what to add to it (VT, Eq. 5, VT-22 … VT-24, VTR-07)."""

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from saccade.kernels import allowed, suits
from saccade.kernels.few_keys import are_few, few_keys
from saccade.layers.grid import to_features, to_pixels
from saccade.layers.linear import LinearNorm, ListNorm, pixel_linear
from saccade.tokens.visual_tokens import pixel_groups


class TokenProjector(nn.Module):
    """pixels + norm(softmax over tokens of query · key, times the tokens).

    The map is first brought to `dim` channels where it has others; the tokens' values too (Eq. 5 adds the tokens
    themselves, which only fits where the widths agree). The gain of the last norm starts at zero, so that a fresh
    projector adds nothing.
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
        self.to_value = LinearNorm(token_dim, dim, norm=norm) if token_dim != dim else nn.Identity()
        self.norm = ListNorm(dim, zero=True, enabled=norm)
        self.drop_path = DropPath(drop_path)

    def forward(self, features: Tensor, tokens: Tensor) -> Tensor:
        """features (B, C, H, W), tokens (B, M, D) -> features (B, dim, H, W), channels-last in memory."""
        pixels = self.widen(to_pixels(features))
        query = self.to_query.grouped(pixels)  # (B, N, groups, dim/groups)
        key, value = self.to_key(tokens), self.to_value(tokens)  # (B, M, dim)
        if not self.norm.bn.training:
            # With fixed statistics the norm is affine, and weights that sum to 1 let it pass: M tokens, not N pixels.
            value = self.norm(value)
        asked = self.ask(query, key, value)  # (B, N, heads, dim/heads)
        if self.norm.bn.training:
            asked = self.norm(asked.flatten(2)).unflatten(2, (self.num_heads, -1))
        pixels = (pixels.unflatten(2, (self.num_heads, -1)) + self.drop_path(asked)).flatten(2)
        return to_features(pixels, features.shape[2], features.shape[3])

    def ask(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query (B, N, groups, dim/groups), key and value (B, M, dim) -> mixed values (B, N, heads, dim/heads)."""
        if not torch.jit.is_scripting():  # noqa: SIM102 (TorchScript skips the branch only when it stands alone)
            if suits(query, key, value) and allowed("few_keys") and key.dtype == value.dtype and query.is_contiguous():
                both = torch.cat((key, value), dim=2)
                if are_few(query.flatten(2), both, self.num_heads):
                    mixed = few_keys(query.flatten(2), both, self.num_heads, self.scale)
                    return mixed.unflatten(2, (self.num_heads, -1))
        query = query.unflatten(3, (self.num_heads // query.shape[2], -1)).flatten(2, 3).transpose(1, 2)
        key = key.unflatten(2, (self.num_heads, -1)).transpose(1, 2)  # (B, heads, M, dim/heads)
        value = value.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(query, key, value, scale=self.scale).transpose(1, 2)
