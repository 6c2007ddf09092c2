"""Do the maps point at the objects? Pointing game and energy in the boxes."""

from typing import NamedTuple

import numpy as np


class Pointing(NamedTuple):
    hit: bool  # the strongest pixel lies in a box
    energy: float  # share of the map's mass inside the boxes
    chance: float  # share of the image inside the boxes: what an even map gets


def point(values: np.ndarray, boxes: np.ndarray) -> Pointing:
    """A map (H, W), not negative, against boxes (n, 4), x0 y0 x1 y1 in pixels of the map. Overlaps count once."""
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
