"""Metrics of token maps: redundancy, entropies, and how well they point at objects."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


def redundancy(maps: Tensor) -> float:
    """Mean over pairs of tokens of the mass their maps (M, H, W) share: 0 disjoint, 1 identical.

    Tokens with empty maps are ignored.
    """
    distributions = _over_pixels(maps)
    count = len(distributions)
    if count < 2:
        return 0.0
    common = sum(float(torch.minimum(one, distributions[i + 1 :]).sum()) for i, one in enumerate(distributions[:-1]))
    return common / (count * (count - 1) / 2)


def token_entropy(maps: Tensor) -> float:
    """Mean entropy of a token over pixels, relative to its maximum: 0 one pixel each, 1 uniform over the image."""
    distributions = _over_pixels(maps)
    entropy = -torch.special.xlogy(distributions, distributions).sum(1)
    return float(entropy.mean() / torch.tensor(float(max(distributions.shape[1], 2))).log())


def pixel_entropy(maps: Tensor) -> float:
    """Mean entropy of a pixel over tokens, relative to its maximum: 0 one token per pixel, 1 uniform over tokens."""
    columns = maps.double().flatten(1).clamp(min=0)
    total = columns.sum(0)
    covered = total > 0
    distributions = columns[:, covered] / total[covered]
    if distributions.numel() == 0:
        return 0.0
    entropy = -torch.special.xlogy(distributions, distributions).sum(0)
    return float(entropy.mean() / torch.tensor(float(max(len(maps), 2))).log())


def _over_pixels(maps: Tensor) -> Tensor:
    """Non-empty maps as distributions over pixels, (M, N)."""
    flat = maps.double().flatten(1).clamp(min=0)
    flat = flat[flat.sum(1) > 0]
    return flat / flat.sum(1, keepdim=True)


class Pointing(NamedTuple):
    """Pointing game of one map."""

    hit: bool  # the maximum lies in a box
    energy: float  # fraction of the map's mass inside the boxes
    chance: float  # fraction of the image inside the boxes: the energy of a uniform map


def pointing_game(values: np.ndarray, boxes: np.ndarray) -> Pointing:
    """A non-negative map (H, W) against boxes (n, 4), x0 y0 x1 y1 in pixels of the map; overlaps count once."""
    inside = inside_boxes(values.shape, boxes)
    total = float(values.sum())
    strongest = np.unravel_index(int(values.argmax()), values.shape)
    energy = float(values[inside].sum() / total) if total > 0 else float(inside.mean())
    return Pointing(bool(inside[strongest]), energy, float(inside.mean()))


def inside_boxes(size: tuple[int, ...], boxes: np.ndarray) -> np.ndarray:
    """Pixels (H, W) whose centre lies in any of the boxes."""
    inside = np.zeros(size, dtype=bool)
    y, x = np.arange(size[0]) + 0.5, np.arange(size[1]) + 0.5
    for x0, y0, x1, y1 in np.asarray(boxes, dtype=float).reshape(-1, 4):
        inside |= ((y >= y0) & (y < y1))[:, None] & ((x >= x0) & (x < x1))[None, :]
    return inside
