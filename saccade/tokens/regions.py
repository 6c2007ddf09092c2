"""Tokens that look: a region each, points in it, samples at the points, decoded into the token (SparseFormer).

One look of a token: adjust its region (SF-18, SF-19), place points in it (SF-05 … SF-08), read the map there
(SF-09), mix what was read by matrices that the token itself makes (SF-13 … SF-15), and add the result to the token.
Everything works on images (2 axes, regions x0 y0 x1 y1) and in videos (3 axes, x0 y0 t0 x1 y1 t1).

Regions and points are float32 at least, whatever the type of the tokens: in bfloat16 the places near the far side of
an image are 1/256 apart. Tokens and features keep the type of the model or of autocast.
"""

import math

import torch
import torch.nn.functional as F
from timm.layers import drop_path
from torch import Tensor, nn

from saccade.kernels import allowed, mixing, suits
from saccade.kernels import looking as kernels
from saccade.layers.boxes import adjust, centre_and_size, from_centre
from saccade.layers.linear import Linear
from saccade.layers.norm import TokenNorm
from saccade.layers.sampling import any_order, clamp_gradient, sample
from saccade.ops.linear import linear_fixed_layout
from saccade.tokens.trace import RegionTrace, TubeTrace


class RegionTokenizer(nn.Module):
    """Group pixels into the tokens that look at them: adjust regions, place points, sample, decode, add.

    `restrict_gradient` clamps the gradient of every point, in units of the image, to one pixel height of the map
    (SF-12): bilinear interpolation knows the slope between two pixels only, and the slope can be steep. A loss that was
    scaled against underflow (float16) scales the bound too; tell with `loss_scale.fill_(scaler.get_scale())`.
    """

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

        `drop` is the drop path rate of this pass; the deltas of the regions are dropped like any residual (SF-51).
        """
        regions, points = self.place(tokens, regions, drop)
        if self.restrict_gradient and torch.is_grad_enabled():
            points = clamp_gradient(points, self.loss_scale.to(points.dtype) / features.shape[-2])
        decoded = self.decoder(tokens, features, points)
        return tokens + drop_path(decoded, drop, self.training), regions, points

    def place(self, tokens: Tensor, regions: Tensor, drop: float) -> tuple[Tensor, Tensor]:
        """Where to look: tokens (B, M, D), regions (B, M, 4) -> regions (B, M, 4), points (B, M, P, 2)."""
        if self.adjuster is None:
            return regions, self.placer(tokens, regions)
        deltas = drop_path(self.adjuster(tokens), drop, self.training)
        if not torch.jit.is_scripting():  # noqa: SIM102 (TorchScript skips the branch only when it stands alone)
            if isinstance(self.placer, PointPlacer) and self.placer.axes == 2 and fits_kernels(tokens, regions):
                return self.placer.place(tokens, deltas, regions)
        regions = adjust(regions, deltas.to(regions.dtype))
        return regions, self.placer(tokens, regions)

    def trace(self, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> RegionTrace | TubeTrace:
        """What one call of this module says about where its tokens looked."""
        tokens, regions, points = output
        kind = RegionTrace if regions.shape[-1] == 4 else TubeTrace
        return kind(regions, points, tuple(inputs[2].shape[2:]), tokens)


class RegionAdjuster(nn.Module):
    """From every token, how to shift and grow its region; nothing at first (SF-18, SF-44)."""

    def __init__(self, dim: int, axes: int = 2):
        super().__init__()
        self.norm = TokenNorm(dim)
        self.to_delta = Linear(dim, 2 * axes, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        _quiet(self.norm)
        nn.init.zeros_(self.to_delta.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, M, D) -> deltas (B, M, 4): shifts of the centre in sizes, growths as powers of e."""
        return self.to_delta(self.norm(tokens))


class PointPlacer(nn.Module):
    """Place points in every region: a learned grid, bent by the token; most stay inside (SF-05 … SF-08).

    Offsets of a token are centred and divided by three standard deviations. `scale=0.5` follows Eq. 3 to the letter,
    which shrinks the grid to half the region; the authors' weights want 1.
    """

    precise = ("grid",)

    def __init__(self, dim: int, points: int, axes: int = 2, scale: float = 1.0, eps: float = 1e-5):
        super().__init__()
        self.axes = axes
        self.scale = scale
        self.eps = eps
        self.norm = TokenNorm(dim)
        self.to_offset = Linear(dim, points * axes, bias=False)
        self.grid = nn.Parameter(torch.empty(points * axes))
        self.init_weights()

    def init_weights(self) -> None:
        _quiet(self.norm)
        nn.init.zeros_(self.to_offset.weight)
        with torch.no_grad():
            self.grid.copy_(point_grid(self.grid.numel() // self.axes, self.axes).flatten())

    def forward(self, tokens: Tensor, regions: Tensor) -> Tensor:
        """tokens (B, M, D), regions (B, M, 4) -> points (B, M, P, 2)."""
        offsets = self.to_offset(self.norm(tokens)).to(regions.dtype) + self.grid
        return spread_points(offsets.unflatten(2, (-1, self.axes)), regions, self.scale, self.eps)

    @torch.jit.ignore
    def place(self, tokens: Tensor, deltas: Tensor, regions: Tensor) -> tuple[Tensor, Tensor]:
        """Adjust the regions by the deltas (B, M, 4) first; both in one kernel -> regions, points."""
        offsets = self.to_offset(self.norm(tokens))
        return kernels.place(deltas, regions, offsets, self.grid, self.scale, self.eps)


class FixedPoints(nn.Module):
    """The grid of points in every region, whatever the token: the ablation without focusing (SF-38)."""

    grid: Tensor
    precise = ("grid",)

    def __init__(self, points: int, axes: int = 2, scale: float = 1.0, eps: float = 1e-5):
        super().__init__()
        self.axes = axes
        self.scale = scale
        self.eps = eps
        self.register_buffer("grid", point_grid(points, axes).flatten())

    def forward(self, tokens: Tensor, regions: Tensor) -> Tensor:
        """tokens (B, M, D), regions (B, M, 4) -> points (B, M, P, 2)."""
        offsets = self.grid.to(regions.dtype).view(1, 1, -1, self.axes)
        return spread_points(offsets, regions, self.scale, self.eps)


class AdaptiveDecoder(nn.Module):
    """Decode samples by two matrices that the token makes: one mixes channels, one mixes points (SF-13 … SF-15)."""

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
        """Start as a static mixing: the weights come from the bias alone, two Xavier matrices (SF-47, SF-48)."""
        _quiet(self.norm)
        nn.init.zeros_(self.to_weights.weight)
        with torch.no_grad():
            channel, point = self._matrices(self.to_weights.bias)
            nn.init.xavier_uniform_(channel)
            nn.init.xavier_uniform_(point)

    def forward(self, tokens: Tensor, features: Tensor, points: Tensor) -> Tensor:
        """tokens (B, M, D), features (B, C, H, W), points (B, M, P, 2) -> what to add to the tokens (B, M, D)."""
        hidden = self.to_hidden(self.norm(tokens))
        if torch.jit.is_scripting():
            weights = self.to_weights(hidden)
        else:
            weights = linear_fixed_layout(hidden, self.to_weights)
            if learns_at_once(features, points, weights):
                return self.proj(mixing.look(features, points, weights, self.channel_bias, self.point_bias).flatten(2))
        channel, point = self._matrices(weights)
        mixed = sample_and_mix(features, points, channel, point, self.channel_bias, self.point_bias)
        return self.proj(mixed.flatten(2))

    def _matrices(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """(..., C C + P P) -> channel matrix (..., C, C), point matrix (..., P, P); views."""
        square = self.channels * self.channels
        channel = weights[..., :square].unflatten(-1, (self.channels, self.channels))
        point = weights[..., square:].unflatten(-1, (self.points, self.points))
        return channel, point


class StaticDecoder(nn.Module):
    """The same mixing with one pair of matrices for all tokens: Table 3e, "static, mix" (SF-16)."""

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
        """tokens (B, M, D), features (B, C, H, W), points (B, M, P, 2) -> what to add to the tokens (B, M, D)."""
        batch, count = tokens.shape[0], tokens.shape[1]
        channel = self.channel_weights.to(tokens.dtype).expand(batch, count, -1, -1)
        point = self.point_weights.to(tokens.dtype).expand(batch, count, -1, -1)
        mixed = sample_and_mix(features, points, channel, point, self.channel_bias, self.point_bias)
        return self.proj(mixed.flatten(2))


class LinearDecoder(nn.Module):
    """One linear layer on the samples: Table 3e, "linear" (SF-16)."""

    def __init__(self, dim: int, channels: int, points: int):
        super().__init__()
        self.proj = Linear(points * channels, dim)

    def forward(self, tokens: Tensor, features: Tensor, points: Tensor) -> Tensor:
        """features (B, C, H, W), points (B, M, P, 2) -> what to add to the tokens (B, M, D); tokens do not matter."""
        return self.proj(sample(features, points).flatten(2))


def sample_and_mix(
    features: Tensor,
    points: Tensor,
    channel_weights: Tensor,
    point_weights: Tensor,
    channel_bias: Tensor,
    point_bias: Tensor,
) -> Tensor:
    """Read the map at every token's points and mix what was read, channels first, then points (SF-09, SF-14).

    features (B, C, H, W), points (B, M, P, 2), channel_weights (B, M, C, C) as (in, out), point_weights (B, M, P, P),
    channel_bias (C), point_bias (P) -> mixed (B, M, P, C). The hot step of the family.
    """
    if not torch.jit.is_scripting():  # noqa: SIM102 (TorchScript skips the branch only when it stands alone)
        if mixes_at_once(features, points, channel_weights, point_weights):
            matrices = channel_weights, point_weights
            return kernels.mix(features.permute(0, 2, 3, 1), points, *matrices, channel_bias, point_bias)
    sampled = sample(features, points).flatten(0, 1)  # (B M, P, C)
    channel_bias, point_bias = channel_bias.to(sampled.dtype), point_bias.to(sampled.dtype).unsqueeze(1)
    mixed = F.gelu(torch.baddbmm(channel_bias, sampled, channel_weights.flatten(0, 1)))
    mixed = F.gelu(torch.baddbmm(point_bias, point_weights.flatten(0, 1), mixed))  # (B M, P, C)
    return mixed.unflatten(0, (features.shape[0], -1))


def fits_kernels(tokens: Tensor, coordinates: Tensor) -> bool:
    """Whether the fused kernel takes these; under a compiler it has no way back."""
    if torch.compiler.is_compiling() and torch.is_grad_enabled():
        return False
    return coordinates.dtype == torch.float32 and suits(tokens, coordinates) and allowed("place")


def mixes_at_once(features: Tensor, points: Tensor, channel_weights: Tensor, point_weights: Tensor) -> bool:
    """Whether sampling and mixing can be one kernel, without gradient."""
    if torch.is_grad_enabled() or not _small(features, points):
        return False
    known = points.dtype == torch.float32 and suits(features, points, channel_weights, point_weights)
    return known and allowed("mix") and kernels.mixes(channel_weights, point_weights)


def learns_at_once(features: Tensor, points: Tensor, weights: Tensor) -> bool:
    """The same where gradients may be asked for, of matrices as they are made, (B, M, C C + P P).

    In float32 those of the way back fill a chip sooner: larger ones it would keep outside, and wait for.
    """
    if not torch.is_grad_enabled() or not _small(features, points):
        return False
    if weights.dtype == torch.float32 and (points.shape[2] > 16 or features.shape[1] > 48):
        return False
    known = points.dtype == torch.float32 and suits(features, points, weights)
    return known and allowed("mix") and any_order()


def _small(features: Tensor, points: Tensor) -> bool:
    """Whether these are images, and matrices small enough for a chip."""
    return points.shape[-1] == 2 and points.shape[2] <= 64 and features.shape[1] <= 128


def spread_points(offsets: Tensor, regions: Tensor, scale: float, eps: float) -> Tensor:
    """offsets (B, M, P, A), centred and cut to a third of their spread, placed in regions (B, M, 2 A)."""
    centred = offsets - offsets.mean(2, keepdim=True)
    offsets = centred / (3 * (offsets.std(2, keepdim=True) + eps))
    centre, size = centre_and_size(regions)
    return centre.unsqueeze(2) + scale * offsets * size.unsqueeze(2)


def point_grid(points: int, axes: int = 2) -> Tensor:
    """First offsets (P, A): cell centres of a square grid over [-0.5, 0.5], x slowest (SF-43).

    In a video the points spread over time too, such that every row and every column of the grid sees every moment
    once. (All at one moment would be a spread of zero, and its gradient would be multiplied by 1 / eps.) A number of
    points that is not a square starts at random places of the same range.
    """
    if points < 2:
        raise ValueError(f"a token needs at least 2 points to have a spread; got {points}.")
    side = math.isqrt(points)
    if side * side != points:
        return torch.rand(points, axes) - 0.5
    line = (torch.arange(side) + 0.5) / side - 0.5
    across, down = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    places = torch.stack([across, down, (across + down) % side], dim=-1).flatten(0, 1)  # (P, 3)
    return line[places[:, :axes]]


def region_grid(num_tokens: int, init: str = "half") -> Tensor:
    """First regions (M, 4) on a square grid inside the image, x slowest (SF-45, SF-46).

    Sides are "half" the image, a "cell" of the grid, or the "whole" image. A number of tokens that is not a square
    starts at random centres of the same range.
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


def region_tubes(regions: Tensor, segments: int) -> Tensor:
    """regions (M, 4) in each of `segments` equal parts of time, one part after the other -> tubes (segments M, 6)."""
    ends = torch.arange(segments + 1, dtype=regions.dtype, device=regions.device) / segments
    low, high = regions.repeat(segments, 1).chunk(2, dim=1)
    start, end = (time.repeat_interleave(len(regions))[:, None] for time in (ends[:-1], ends[1:]))
    return torch.cat([low, start, high, end], dim=1)


def _quiet(norm: nn.LayerNorm) -> None:
    """The norms in front of layers that start at zero start small themselves (SF-48)."""
    nn.init.constant_(norm.weight, norm.normalized_shape[0] ** -0.5)
    nn.init.zeros_(norm.bias)
