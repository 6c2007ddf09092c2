"""Deletion and insertion curves: class probability while pixels are removed or inserted, most important first.

For a faithful map the deletion curve falls early (small area) and the insertion curve rises early (large area).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

STEPS = 16
BATCH_SIZE = 8


class Curve(NamedTuple):
    """Class probability against the fraction of changed pixels."""

    fraction: np.ndarray  # (STEPS + 1,), 0 to 1
    probability: np.ndarray  # (STEPS + 1,)

    @property
    def area(self) -> float:
        """Area under the curve, 0 to 1."""
        heights = (self.probability[1:] + self.probability[:-1]) / 2
        return float((heights * np.diff(self.fraction)).sum())


def deletion(image: Tensor, values: Tensor, classify: Callable[[Tensor], Tensor], steps: int = STEPS) -> Curve:
    """Replace pixels of an image (3, H, W) by its mean colour, highest of `values` (H, W) first.

    `classify` maps images (B, 3, H, W) to the probability (B,) of the class.
    """
    background = image.mean((1, 2), keepdim=True).expand_as(image)
    return _curve(image, background, values, classify, steps)


def insertion(image: Tensor, values: Tensor, classify: Callable[[Tensor], Tensor], steps: int = STEPS) -> Curve:
    """Replace pixels of the blurred image by those of the image, highest of `values` first."""
    return _curve(blur(image), image, values, classify, steps)


def blur(image: Tensor, sigma_fraction: float = 0.08) -> Tensor:
    """Gaussian blur of an image (3, H, W) with reflection padding; sigma relative to the shorter side."""
    height, width = image.shape[1:]
    sigma = max(1.0, sigma_fraction * min(height, width))
    radius = min(int(3 * sigma), min(height, width) - 1)
    x = torch.arange(-radius, radius + 1, device=image.device, dtype=image.dtype)
    kernel = torch.exp(-(x**2) / (2 * sigma**2))
    kernel = (kernel / kernel.sum()).expand(3, 1, -1)
    padded = torch.nn.functional.pad(image[None], (radius,) * 4, mode="reflect")
    horizontal = torch.nn.functional.conv2d(padded, kernel[:, :, None], groups=3)
    return torch.nn.functional.conv2d(horizontal, kernel[..., None], groups=3)[0]


@torch.no_grad()
def _curve(start: Tensor, end: Tensor, values: Tensor, classify: Callable[[Tensor], Tensor], steps: int) -> Curve:
    order = values.flatten().argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    rank = rank.reshape(values.shape)
    counts = [round(len(order) * i / steps) for i in range(steps + 1)]
    images = torch.stack([torch.where(rank < count, end, start) for count in counts])
    probability = torch.cat([classify(batch) for batch in images.split(BATCH_SIZE)])
    return Curve(np.array(counts) / len(order), probability.double().cpu().numpy())
