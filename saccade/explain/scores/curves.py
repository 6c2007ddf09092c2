"""Deletion and insertion: take the pixels away, or bring them in, the most important first, and watch the probability.

Good maps make the deletion curve fall early (small area) and the insertion curve rise early (large area). A random
order is drawn beside them, as the ground line.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

STEPS = 16


class Curve(NamedTuple):
    share: np.ndarray  # (STEPS + 1,) of the pixels changed, 0 to 1
    probability: np.ndarray  # (STEPS + 1,) of the class

    @property
    def area(self) -> float:
        """Under the curve, 0 to 1."""
        heights = (self.probability[1:] + self.probability[:-1]) / 2
        return float((heights * np.diff(self.share)).sum())


def deletion(image: Tensor, values: Tensor, classify: Callable[[Tensor], Tensor], steps: int = STEPS) -> Curve:
    """Replace pixels of a picture (3, H, W) by its mean colour, highest of `values` (H, W) first.

    `classify` gives the probability (B,) of the class for pictures (B, 3, H, W).
    """
    ground = image.mean((1, 2), keepdim=True).expand_as(image)
    return _curve(image, ground, values, classify, steps)


def insertion(image: Tensor, values: Tensor, classify: Callable[[Tensor], Tensor], steps: int = STEPS) -> Curve:
    """Start from the blurred picture and bring the pixels in, highest first."""
    return _curve(blur(image), image, values, classify, steps)


def blur(image: Tensor, share: float = 0.08) -> Tensor:
    """Gaussian blur of a picture (3, H, W), its sigma a share of the shorter side; mirrored at the rim."""
    height, width = image.shape[1:]
    sigma = max(1.0, share * min(height, width))
    radius = min(int(3 * sigma), min(height, width) - 1)
    x = torch.arange(-radius, radius + 1, device=image.device, dtype=image.dtype)
    kernel = torch.exp(-(x**2) / (2 * sigma**2))
    kernel = (kernel / kernel.sum()).expand(3, 1, -1)
    padded = torch.nn.functional.pad(image[None], (radius,) * 4, mode="reflect")
    across = torch.nn.functional.conv2d(padded, kernel[:, :, None], groups=3)
    return torch.nn.functional.conv2d(across, kernel[..., None], groups=3)[0]


@torch.no_grad()
def _curve(start: Tensor, end: Tensor, values: Tensor, classify: Callable[[Tensor], Tensor], steps: int) -> Curve:
    order = values.flatten().argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    rank = rank.reshape(values.shape)
    counts = [round(len(order) * i / steps) for i in range(steps + 1)]
    pictures = torch.stack([torch.where(rank < count, end, start) for count in counts])
    found = torch.cat([classify(some) for some in pictures.split(8)])
    return Curve(np.array(counts) / len(order), found.double().cpu().numpy())
