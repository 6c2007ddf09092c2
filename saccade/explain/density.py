"""Density of points on the image by a top-hat kernel (SF-77), exact and fast: every point is a disc of equal weight."""

import torch
from torch import Tensor

BANDWIDTH = 1 / 28  # radius of the disc, in units of the image's sides; the paper does not say
WIDE = 3 / 28  # for the view of a single token: wide enough to join its few points to one area


def top_hat(points: Tensor, size: tuple[int, int], bandwidth: float = BANDWIDTH) -> Tensor:
    """Points (…, P, 2), x y in units of the image -> (…, *size): the share of points within `bandwidth` of a pixel.

    A disc is one run of pixels in every row it crosses. Runs are added as +1 where they begin and -1 where they end,
    and a running sum fills them: as many steps as points times rows, not points times pixels.
    """
    height, width = size
    points = points.double()
    x, y = points[..., 0, None], points[..., 1, None]  # (…, P, 1)
    rows = (torch.arange(height, device=points.device, dtype=points.dtype) + 0.5) / height
    half = (bandwidth**2 - (rows - y).square()).clamp(min=0).sqrt()  # (…, P, H)
    first = ((x - half) * width - 0.5).ceil().clamp(0, width).long()
    last = ((x + half) * width - 0.5).floor().add(1).clamp(0, width).long()
    inside = ((rows - y).abs() <= bandwidth).to(points.dtype)
    steps = points.new_zeros(*points.shape[:-2], height, width + 1)
    steps.scatter_add_(-1, first.transpose(-1, -2), inside.transpose(-1, -2))
    steps.scatter_add_(-1, last.transpose(-1, -2), -inside.transpose(-1, -2))
    return (steps.cumsum(-1)[..., :width] / points.shape[-2]).float()
