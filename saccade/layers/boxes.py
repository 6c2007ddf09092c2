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
    """Shift boxes by fractions of their size and grow them by powers of e (SparseFormer Eqs. 7-8).

    boxes and deltas (shifts, growths) are (..., 2 A). A box whose ends training has swapped counts with its absolute
    size, as in the authors' code: the result has low ends first. No step changes a side by more than e^limit,
    3000-fold: never reached in practice, but boxes stay finite.
    """
    centre, size = centre_and_size(boxes)
    size = size.abs()
    shift, growth = deltas.chunk(2, dim=-1)
    centre = centre + shift * size  # SparseFormer Eq. 7
    size = size * growth.clamp(-limit, limit).exp()  # SparseFormer Eq. 8
    return from_centre(centre, size)
