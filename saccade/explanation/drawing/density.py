"""Density of SparseFormer's sampling points: a top-hat kernel over all points, a Gaussian per token."""

import torch
from torch import Tensor

BANDWIDTH = 1 / 28  # radius of the top-hat kernel, in units of the image sides; SparseFormer Figs. 3-5 do not give it
MIN_DEVIATION = 0.02  # of a token's Gaussian, in units of the image sides
CUTOFF = 2.5  # of a token's Gaussian, in standard deviations


def top_hat(points: Tensor, size: tuple[int, int], bandwidth: float = BANDWIDTH) -> Tensor:
    """Points (…, P, 2), x y in [0, 1] -> (…, *size): fraction of points within `bandwidth` of each pixel centre.

    A disc covers one run of pixels in every row. Each run adds +1 at its first pixel and -1 after its last, and a
    cumulative sum fills it: the cost is points x rows, not points x pixels.
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


def gaussian_maps(points: Tensor, size: tuple[int, int]) -> Tensor:
    """Points (M, P, 2) -> (M, *size): Gaussian with the mean and covariance of each token's points.

    Cut off at CUTOFF standard deviations. Each map sums to about 1 over the image, so of two overlapping tokens the one
    with the smaller area is stronger.
    """
    height, width = size
    points = points.double()
    centre = points.mean(1)  # (M, 2)
    covariance = (points - centre[:, None]).mT @ (points - centre[:, None]) / points.shape[1]
    covariance = covariance + MIN_DEVIATION**2 * torch.eye(2, dtype=points.dtype, device=points.device)
    x = (torch.arange(width, device=points.device, dtype=points.dtype) + 0.5) / width - centre[:, 0, None]
    y = (torch.arange(height, device=points.device, dtype=points.dtype) + 0.5) / height - centre[:, 1, None]
    inverse = torch.linalg.inv(covariance)[..., None, None]  # (M, 2, 2, 1, 1)
    dx, dy = x[:, None, :], y[:, :, None]
    distance = inverse[:, 0, 0] * dx**2 + 2 * inverse[:, 0, 1] * dx * dy + inverse[:, 1, 1] * dy**2
    peak = 1 / (2 * torch.pi * torch.linalg.det(covariance).sqrt() * height * width)
    return torch.where(distance <= CUTOFF**2, peak[:, None, None] * torch.exp(-distance / 2), 0.0).float()
