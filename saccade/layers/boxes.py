"""Boxes as corners, all low ends first: x0 y0 x1 y1 on an image, x0 y0 t0 x1 y1 t1 in a video."""

import torch
from torch import Tensor


def centre_and_size(boxes: Tensor) -> tuple[Tensor, Tensor]:
    """boxes (..., 2 A) -> centre (..., A), size (..., A), A axes."""
    low, high = boxes.chunk(2, dim=-1)
    return (low + high) / 2, high - low


def from_centre(centre: Tensor, size: Tensor) -> Tensor:
    """centre (..., A), size (..., A) -> boxes (..., 2 A)."""
    return torch.cat([centre - size / 2, centre + size / 2], dim=-1)


def adjust(boxes: Tensor, deltas: Tensor, limit: float = 8.0) -> Tensor:
    """Shift by a share of the size, grow by a power of e (SF-19); both (..., 2 A), deltas (shifts, growths).

    No step grows or shrinks a side more than e^limit, 3000-fold: never reached in practice, but a box stays finite.
    """
    centre, size = centre_and_size(boxes)
    shift, growth = deltas.chunk(2, dim=-1)
    return from_centre(centre + shift * size, size * growth.clamp(-limit, limit).exp())
