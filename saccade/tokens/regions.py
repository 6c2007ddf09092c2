"""Latent tokens with regions: points in the region, features sampled at the points, decoded into the token.

One sampling step of SparseFormer: adjust the region (SparseFormer Eqs. 7-9), place points in it (Eqs. 2-3), sample the
features there (Sec. 3.1), mix the samples by matrices that the token generates (Eqs. 4-6), and add the result to the
token. It works on images (2 axes, regions x0 y0 x1 y1) and videos (3 axes, x0 y0 t0 x1 y1 t1). Eqs. 3, 5 and 6
are computed in `ops.roi_sampling`, Eqs. 7-8 in `layers.boxes`.

SparseFormer v2 (arXiv 2312.01987) has its own decoder, adjuster and border padding, and encodes the region of a token
as a position: `ProductDecoder`, `MlpAdjuster`, `RegionPosition`.

Regions and points are float32 at least, whatever the dtype of the tokens: in bfloat16 positions near the far side of an
image are 1/256 apart. Tokens and features keep the dtype of the model or of autocast.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import drop_path
from torch import Tensor, nn

from saccade.layers.boxes import adjust, from_centre
from saccade.layers.linear import Linear
from saccade.layers.norm import TokenNorm
from saccade.ops.linear import linear_fixed_layout, linear_gelu
from saccade.ops.roi_sampling import clamp_gradient, place_points, sample, sample_and_mix, spread_points
from saccade.tokens.trace import RegionTrace, TubeTrace


class RegionTokenizer(nn.Module):
    """Group pixels into tokens: adjust regions, place points, sample, decode, add.

    `restrict_gradient` clamps the gradient of every point, in units of the image, to one pixel height of the features:
    bilinear interpolation only knows the slope between two pixels, which can be steep. A loss that is scaled against
    underflow (float16) scales the bound too: `loss_scale.fill_(scaler.get_scale())`.
    """

    loss_scale: Tensor

    def __init__(self, adjuster: nn.Module | None, placer: nn.Module, decoder: nn.Module, restrict_gradient: bool):
        super().__init__()
        self.adjuster = adjuster
        self.placer = placer
        self.decoder = decoder
        self.restrict_gradient = restrict_gradient
        self.register_buffer("loss_scale", torch.ones(()), persistent=False)

    def forward(
        self, tokens: Tensor, regions: Tensor, features: Tensor, drop: float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """tokens (B, M, D), regions (B, M, 4), features (B, C, H, W) -> tokens, regions, points (B, M, P, 2).

        `drop` is the drop path rate of this pass; the deltas of the regions are dropped like any residual.
        """
        deltas = None if self.adjuster is None else drop_path(self.adjuster(tokens), drop, self.training)
        regions, points = self.placer(tokens, regions, deltas)
        if self.restrict_gradient:
            points = clamp_gradient(points, self.loss_scale.to(points.dtype) / features.shape[-2])
        decoded = self.decoder(tokens, features, points)
        return tokens + drop_path(decoded, drop, self.training), regions, points

    def trace(self, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> RegionTrace | TubeTrace:
        """Regions and points of one call of this module."""
        tokens, regions, points = output
        kind = RegionTrace if regions.shape[-1] == 4 else TubeTrace
        return kind(regions, points, tuple(inputs[2].shape[2:]), tokens)


class RegionAdjuster(nn.Module):
    """How every token shifts and grows its region (SparseFormer Eq. 9); not at all at initialisation."""

    def __init__(self, dim: int, axes: int = 2):
        super().__init__()
        self.norm = TokenNorm(dim)
        self.to_delta = Linear(dim, 2 * axes, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        _init_small(self.norm)
        nn.init.zeros_(self.to_delta.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, M, D) -> deltas (B, M, 4): shifts of the centre in region sizes, logarithms of growth factors."""
        return self.to_delta(self.norm(tokens))  # SparseFormer Eq. 9


class PointPlacer(nn.Module):
    """Place points in every region: a learned grid plus offsets from the token (SparseFormer Eqs. 2-3).

    The offsets of a token are centred and divided by three standard deviations, so most points stay inside. `scale=0.5`
    follows Eq. 3 literally, which shrinks the grid to half the region; the authors' weights expect 1. `eps` is added to
    the standard deviation, `norm_eps` belongs to the LayerNorm of the tokens.
    """

    precise = ("grid",)

    def __init__(
        self, dim: int, points: int, axes: int = 2, scale: float = 1.0, eps: float = 1e-5, norm_eps: float = 1e-6
    ):
        super().__init__()
        self.axes = axes
        self.scale = scale
        self.eps = eps
        self.norm = TokenNorm(dim, norm_eps)
        self.to_offset = Linear(dim, points * axes, bias=False)
        self.grid = nn.Parameter(torch.empty(points * axes))
        self.init_weights()

    def init_weights(self) -> None:
        _init_small(self.norm)
        nn.init.zeros_(self.to_offset.weight)
        with torch.no_grad():
            self.grid.copy_(point_grid(self.grid.numel() // self.axes, self.axes).flatten())

    def forward(self, tokens: Tensor, regions: Tensor, deltas: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """tokens (B, M, D), regions (B, M, 4), deltas (B, M, 4) -> adjusted regions, points (B, M, P, 2)."""
        offsets = self.to_offset(self.norm(tokens))  # SparseFormer Eq. 2
        if deltas is None:
            deltas = torch.zeros_like(regions)
        return place_points(regions, deltas, offsets, self.grid, self.scale, self.eps)


class FixedPoints(nn.Module):
    """The same grid of points in every region, whatever the token: SparseFormer Table 3b, "nil"."""

    grid: Tensor
    precise = ("grid",)

    def __init__(self, points: int, axes: int = 2, scale: float = 1.0, eps: float = 1e-5):
        super().__init__()
        self.axes = axes
        self.scale = scale
        self.eps = eps
        self.register_buffer("grid", point_grid(points, axes).flatten())

    def forward(self, tokens: Tensor, regions: Tensor, deltas: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """tokens (B, M, D), regions (B, M, 4) -> the same regions, points (B, M, P, 2)."""
        offsets = self.grid.to(regions.dtype).view(1, 1, -1, self.axes)
        return regions, spread_points(offsets, regions, self.scale, self.eps)


class AdaptiveDecoder(nn.Module):
    """Decode samples by two matrices that the token generates, over channels and points (SparseFormer Eqs. 4-6)."""

    def __init__(self, dim: int, channels: int, points: int, eps: float = 1e-5):
        super().__init__()
        self.channels = channels
        self.points = points
        self.norm = TokenNorm(dim, eps)
        self.to_hidden = Linear(dim, dim // 4)
        self.to_weights = Linear(dim // 4, channels * channels + points * points)
        self.channel_bias = nn.Parameter(torch.zeros(channels))
        self.point_bias = nn.Parameter(torch.zeros(points))
        self.proj = Linear(points * channels, dim)
        self.init_weights()

    def init_weights(self) -> None:
        """Start as a static mixing: the matrices come from the bias alone, Xavier uniform."""
        _init_small(self.norm)
        nn.init.zeros_(self.to_weights.weight)
        with torch.no_grad():
            channel, point = self.to_weights.bias.split((self.channels**2, self.points**2))
            nn.init.xavier_uniform_(channel.view(self.channels, self.channels))
            nn.init.xavier_uniform_(point.view(self.points, self.points))

    def forward(self, tokens: Tensor, features: Tensor, points: Tensor) -> Tensor:
        """tokens (B, M, D), features (B, C, H, W), points (B, M, P, 2) -> updates of the tokens (B, M, D)."""
        # SparseFormer Eq. 4: channel matrix (C, C) and point matrix (P, P) of every token, (B, M, C C + P P)
        weights = linear_fixed_layout(self.to_hidden(self.norm(tokens)), self.to_weights)
        mixed = sample_and_mix(features, points, weights, self.channel_bias, self.point_bias)
        return self.proj(mixed.flatten(2))


class ProductDecoder(nn.Module):
    """Decode samples by two generated matrices: GELU(point matrix @ (samples @ channel matrix)) (SparseFormer v2).

    Unlike `AdaptiveDecoder` it has no biases and no activation between the products, mixes P points into `mixed_points`
    others, generates the matrices through a layer of `hidden_dim`, and samples with border padding.
    """

    def __init__(self, dim: int, channels: int, points: int, mixed_points: int, hidden_dim: int, eps: float = 1e-5):
        super().__init__()
        self.channels = channels
        self.points = points
        self.mixed_points = mixed_points
        self.norm = TokenNorm(dim, eps)
        self.to_hidden = Linear(dim, hidden_dim)
        self.to_weights = Linear(hidden_dim, channels * channels + mixed_points * points)
        self.proj = Linear(mixed_points * channels, dim)
        self.init_weights()

    def init_weights(self) -> None:
        """Start as a static mixing: the matrices come from the bias alone, Xavier uniform."""
        _init_small(self.norm)
        nn.init.zeros_(self.to_weights.weight)
        with torch.no_grad():
            channel, point = self._matrices(self.to_weights.bias)
            nn.init.xavier_uniform_(channel)
            nn.init.xavier_uniform_(point)

    def _matrices(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """weights (..., C C + Q P) -> channel matrix (..., C, C), (in, out); point matrix (..., Q, P), (out, in)."""
        channel, point = weights.split((self.channels**2, self.mixed_points * self.points), dim=-1)
        return (
            channel.unflatten(-1, (self.channels, self.channels)),
            point.unflatten(-1, (self.mixed_points, self.points)),
        )

    def forward(self, tokens: Tensor, features: Tensor, points: Tensor) -> Tensor:
        """tokens (B, M, D), features (B, C, H, W), points (B, M, P, 2) -> updates of the tokens (B, M, D)."""
        weights = linear_fixed_layout(self.to_hidden(self.norm(tokens)), self.to_weights)
        channel_matrix, point_matrix = self._matrices(weights.flatten(0, 1))
        samples = sample(features, clamp_to_border(points, features)).flatten(0, 1)  # (B M, P, C)
        mixed = F.gelu(torch.bmm(point_matrix, torch.bmm(samples, channel_matrix)))  # (B M, Q, C)
        return self.proj(mixed.flatten(1).unflatten(0, tokens.shape[:2]))


class MlpAdjuster(nn.Module):
    """Shift and grow regions by an MLP of the token (SparseFormer v2); not at all at initialisation."""

    def __init__(self, dim: int, eps: float = 1e-5):
        super().__init__()
        self.norm = TokenNorm(dim, eps)
        self.fc = Linear(dim, dim)
        self.to_delta = Linear(dim, 4, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        _init_small(self.norm)
        nn.init.zeros_(self.to_delta.weight)

    def forward(self, tokens: Tensor, regions: Tensor) -> Tensor:
        """tokens (B, M, D), regions (B, M, 4) -> adjusted regions (B, M, 4), with low corners first."""
        deltas = self.to_delta(linear_gelu(self.norm(tokens), self.fc))
        return adjust(regions, deltas.to(regions.dtype))


class RegionPosition(nn.Module):
    """Encode the four numbers of a region by sines and cosines, then norm and linear map (SparseFormer v2).

    The encoding passes no gradient to the region.
    """

    def __init__(self, dim: int, max_frequency: float = 128.0, eps: float = 1e-5):
        super().__init__()
        if dim % 8:
            raise ValueError(f"dim ({dim}) must be divisible by 8: a sine and a cosine for each of 4 numbers.")
        self.frequencies = dim // 4
        self.max_frequency = max_frequency
        self.norm = TokenNorm(dim, eps)
        self.proj = Linear(dim, dim)

    def encode(self, regions: Tensor) -> Tensor:
        """regions (B, M, 4) -> (B, M, D): for x0, y0, x1, y1 in turn, sines of even and cosines of odd frequencies."""
        exponent = torch.arange(self.frequencies, device=regions.device, dtype=regions.dtype) / (self.frequencies - 1)
        angle = math.pi * regions.detach().unsqueeze(-1) * self.max_frequency**exponent  # (B, M, 4, D/4)
        return torch.cat([angle[..., 0::2].sin(), angle[..., 1::2].cos()], dim=-1).flatten(2)

    def forward(self, tokens: Tensor, regions: Tensor) -> Tensor:
        """tokens (B, M, D), regions (B, M, 4) -> tokens with their positions (B, M, D)."""
        return tokens + self.proj(self.norm(self.encode(regions).to(tokens.dtype)))


class StaticDecoder(nn.Module):
    """The same mixing with one pair of matrices for all tokens: SparseFormer Table 3e, "static, mix"."""

    def __init__(self, dim: int, channels: int, points: int):
        super().__init__()
        self.channel_weights = nn.Parameter(torch.empty(channels, channels))
        self.point_weights = nn.Parameter(torch.empty(points, points))
        self.channel_bias = nn.Parameter(torch.zeros(channels))
        self.point_bias = nn.Parameter(torch.zeros(points))
        self.proj = Linear(points * channels, dim)
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.xavier_uniform_(self.channel_weights)
        nn.init.xavier_uniform_(self.point_weights)

    def forward(self, tokens: Tensor, features: Tensor, points: Tensor) -> Tensor:
        """tokens (B, M, D), features (B, C, H, W), points (B, M, P, 2) -> updates of the tokens (B, M, D)."""
        weights = torch.cat([self.channel_weights.flatten(), self.point_weights.flatten()]).to(tokens.dtype)
        weights = weights.expand(tokens.shape[0], tokens.shape[1], -1)  # (B, M, C C + P P)
        mixed = sample_and_mix(features, points, weights, self.channel_bias, self.point_bias)
        return self.proj(mixed.flatten(2))


class LinearDecoder(nn.Module):
    """One linear layer on the samples: SparseFormer Table 3e, "linear"."""

    def __init__(self, dim: int, channels: int, points: int):
        super().__init__()
        self.proj = Linear(points * channels, dim)

    def forward(self, tokens: Tensor, features: Tensor, points: Tensor) -> Tensor:
        """features (B, C, H, W), points (B, M, P, 2) -> updates of the tokens (B, M, D); tokens are not read."""
        return self.proj(sample(features, points).flatten(2))


def point_grid(points: int, axes: int = 2) -> Tensor:
    """Initial offsets (P, A): cell centres of a square grid over [-0.5, 0.5], x slowest.

    In a video the points spread over time too, so that every row and every column of the grid has every moment once.
    (Equal times would have a standard deviation of zero, and gradients would be multiplied by 1 / eps.) A number of
    points that is not a square is sampled uniformly from the same range.
    """
    if points < 2:
        raise ValueError(f"expected points >= 2 (one point has no standard deviation), got {points}.")
    side = math.isqrt(points)
    if side * side != points:
        return torch.rand(points, axes) - 0.5
    line = (torch.arange(side) + 0.5) / side - 0.5
    across, down = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    places = torch.stack([across, down, (across + down) % side], dim=-1).flatten(0, 1)  # (P, 3)
    return line[places[:, :axes]]


def clamp_to_border(points: Tensor, features: Tensor) -> Tensor:
    """points (B, M, P, 2) moved between the centres of the outermost pixels of features (B, C, H, W).

    `sample` of these is `grid_sample(..., padding_mode="border")`, also in its gradients.
    """
    x, y = points.unbind(-1)
    column, row = 0.5 / features.shape[3], 0.5 / features.shape[2]
    return torch.stack([x.clamp(column, 1 - column), y.clamp(row, 1 - row)], dim=-1)


def region_grid(num_tokens: int, init: str = "half") -> Tensor:
    """Initial regions (M, 4) on a square grid inside the image, x slowest (SparseFormer Table 9).

    Sides are "half" the image, a "cell" of the grid, or the "whole" image. For a number of tokens that is not a
    square, centres are sampled uniformly from the same range.
    """
    side = math.isqrt(num_tokens)
    width = {"half": 0.5, "cell": num_tokens**-0.5, "whole": 1.0}[init]
    if side * side != num_tokens:
        centre = width / 2 + (1 - width) * torch.rand(num_tokens, 2)
    else:
        line = width / 2 + (1 - width) * torch.arange(side) / max(side - 1, 1)
        line = line if side > 1 else torch.tensor([0.5])
        centre = torch.cartesian_prod(line, line)
    return from_centre(centre, torch.full_like(centre, width))


def padded_region_grid(num_tokens: int, extra: str = "whole") -> Tensor:
    """Initial regions (M, 4) of SparseFormer v2: the largest square grid of sides 0.5, x slowest, then other tokens.

    Those have the "whole" image, as in the authors' code, or sides 0.5 around "random" centres.
    """
    side = math.isqrt(num_tokens)
    line = torch.arange(side) / max(side - 1, 1) / 2
    low = torch.cartesian_prod(line, line).view(-1, 2)
    num_extra = num_tokens - side * side
    if extra == "whole":
        return torch.cat([torch.cat([low, low + 0.5], 1), torch.tensor([[0.0, 0.0, 1.0, 1.0]]).repeat(num_extra, 1)])
    low = torch.cat([low, torch.rand(num_extra, 2) / 2])
    return torch.cat([low, low + 0.5], 1)


def region_tubes(regions: Tensor, segments: int) -> Tensor:
    """Tubes (segments M, 6): regions (M, 4) repeated for each of `segments` equal parts of the clip."""
    ends = torch.arange(segments + 1, dtype=regions.dtype, device=regions.device) / segments
    low, high = regions.repeat(segments, 1).chunk(2, dim=1)
    start, end = (time.repeat_interleave(len(regions))[:, None] for time in (ends[:-1], ends[1:]))
    return torch.cat([low, start, high, end], dim=1)


def _init_small(norm: nn.LayerNorm) -> None:
    """Initialise norms before zero-initialised layers with gain dim^-1/2, as the authors' code does."""
    nn.init.constant_(norm.weight, norm.normalized_shape[0] ** -0.5)
    nn.init.zeros_(norm.bias)
