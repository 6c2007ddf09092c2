"""Where points lie on the image: their density by a top-hat kernel (SF-77), and the area that one token looks at."""

import torch
from torch import Tensor

BANDWIDTH = 1 / 28  # radius of the disc, in units of the image's sides; the paper does not say
NARROWEST, FARTHEST = 0.02, 2.5  # of an area: its least deviation in units of the image, and its end in deviations


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


def areas(points: Tensor, size: tuple[int, int]) -> Tensor:
    """Points (M, P, 2) -> (M, *size): what each token looks at, as one smooth area around its few points.

    A normal distribution with the mean and covariance of the points, cut off at 2.5 deviations; its sum over the
    image is about 1, so a token that looks closely leads one that looks widely.
    """
    height, width = size
    points = points.double()
    centre = points.mean(1)  # (M, 2)
    spread = (points - centre[:, None]).mT @ (points - centre[:, None]) / points.shape[1]
    spread = spread + NARROWEST**2 * torch.eye(2, dtype=points.dtype, device=points.device)
    x = (torch.arange(width, device=points.device, dtype=points.dtype) + 0.5) / width - centre[:, 0, None]
    y = (torch.arange(height, device=points.device, dtype=points.dtype) + 0.5) / height - centre[:, 1, None]
    inverse = torch.linalg.inv(spread)[..., None, None]  # (M, 2, 2, 1, 1)
    across, down = x[:, None, :], y[:, :, None]
    distance = inverse[:, 0, 0] * across**2 + 2 * inverse[:, 0, 1] * across * down + inverse[:, 1, 1] * down**2
    height_of = 1 / (2 * torch.pi * torch.linalg.det(spread).sqrt() * height * width)
    return torch.where(distance <= FARTHEST**2, height_of[:, None, None] * torch.exp(-distance / 2), 0.0).float()
