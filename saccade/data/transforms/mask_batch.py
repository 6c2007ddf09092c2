"""Augmentation of batches of images and masks on their device.

Scale, crop and flip are combined into one affine map, which is sampled bilinearly from the image and by nearest
neighbour from the mask. Every pair has its own parameters, and nothing synchronises with the GPU.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.data.sources.masks import IGNORE
from saccade.data.transforms.batch import affine, blend, normalize, sample_bilinear, window_grid

RGB_TO_YIQ = ((0.299, 0.587, 0.114), (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))
YIQ_TO_RGB = tuple(map(tuple, np.linalg.inv(RGB_TO_YIQ).tolist()))
BALANCE_GRID = 16  # points per side at which the classes in a window are counted


class PairAugment:
    """uint8 images (B, 3, h, w) and masks (B, h, w) -> normalized (B, 3, S, S) and (B, S, S) int64.

    The arguments are those of `TrainPair`.
    """

    def __init__(
        self,
        size: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        base: int | None = None,
        scale: tuple[float, float] = (0.5, 2.0),
        max_class_fraction: float = 0.75,
        attempts: int = 10,
        flip: float = 0.5,
        distort: bool = True,
        flipped_classes: Sequence[int] = (),
    ):
        self.size, self.mean, self.std, self.base, self.scale = size, mean, std, base, scale
        self.max_class_fraction, self.attempts, self.flip, self.distort = max_class_fraction, attempts, flip, distort
        self.flipped_classes = (*flipped_classes, *range(len(flipped_classes), 256))

    def __call__(self, images: Tensor, masks: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        batch, _, height, width = images.shape
        uniform = torch.rand(2, batch, device=images.device, generator=generator)
        factor = self.scale[0] + uniform[0] * (self.scale[1] - self.scale[0])
        if self.base is not None:
            factor = factor * (self.base / min(height, width))
        window_height, window_width = (
            self.size / (factor * height),
            self.size / (factor * width),
        )  # relative to the image
        y, x = self._sample_centres(masks, window_height, window_width, generator)
        sign = torch.where(uniform[1] < self.flip, -1.0, 1.0)
        pixels = images.float() / 255
        if self.distort:
            pixels = distort_colours(pixels, generator)
        grid = window_grid(affine(sign * window_width, 0.0, x, 0.0, window_height, y), self.size)
        pixels = sample_bilinear(normalize(pixels, self.mean, self.std), grid)
        labels = sample_nearest(masks, grid).long()
        flipped = device_constant(self.flipped_classes, labels.device)[labels]
        return pixels, torch.where((sign < 0)[:, None, None], flipped, labels)

    def _sample_centres(
        self, masks: Tensor, height: Tensor, width: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Centres (B,) in [-1, 1] of windows that no class dominates, or of the last attempt."""
        batch, attempts, device = masks.shape[0], self.attempts, masks.device
        height, width = height[:, None].expand(-1, attempts), width[:, None].expand(-1, attempts)
        uniform = torch.rand(2, batch, attempts, device=device, generator=generator) * 2 - 1
        y = uniform[0] * (1 - height).clamp(min=0) + (height - 1).clamp(
            min=0
        )  # smaller images are padded at the bottom
        x = uniform[1] * (1 - width).clamp(min=0) + (width - 1).clamp(min=0)  # and at the right
        windows = affine(width.flatten(), 0.0, x.flatten(), 0.0, height.flatten(), y.flatten())
        grid = window_grid(windows, BALANCE_GRID).view(batch, attempts * BALANCE_GRID, BALANCE_GRID, 2)
        labels = sample_nearest(masks, grid).long().view(batch * attempts, -1)
        counts = torch.zeros(batch * attempts, 256, device=device)
        counts = counts.scatter_add_(1, labels, torch.ones(labels.shape, device=device))[:, :IGNORE]
        balanced = (counts.amax(1) <= self.max_class_fraction * counts.sum(1)) & ((counts > 0).sum(1) > 1)
        balanced = balanced.view(batch, attempts)
        balanced[:, -1] = True
        first = balanced.float().argmax(1, keepdim=True)
        return y.gather(1, first)[:, 0], x.gather(1, first)[:, 0]


def sample_nearest(masks: Tensor, grid: Tensor) -> Tensor:
    """masks (B, h, w) at points (B, H, W, 2) -> (B, H, W) float; IGNORE outside the image."""
    shifted = masks[:, None].float() - IGNORE  # grid_sample pads with 0, which becomes IGNORE
    return F.grid_sample(shifted, grid, mode="nearest", padding_mode="zeros", align_corners=False)[:, 0] + IGNORE


def distort_colours(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Random brightness, contrast, saturation and hue, each with probability 0.5; pixels (B, 3, h, w) in [0, 1]."""
    batch, device = pixels.shape[0], pixels.device
    amount = torch.rand(4, batch, device=device, generator=generator) * 2 - 1
    amount = torch.where(torch.rand(4, batch, device=device, generator=generator) < 0.5, amount, 0.0)
    pixels = (pixels + (32 / 255) * amount[0][:, None, None, None]).clamp(0, 1)
    pixels = blend(pixels, "contrast", 1 + 0.5 * amount[1])
    pixels = blend(pixels, "saturation", 1 + 0.5 * amount[2])
    return torch.einsum("bij,bjhw->bihw", hue_rotation(math.radians(18) * amount[3]), pixels).clamp(0, 1)


def hue_rotation(angle: Tensor) -> Tensor:
    """Angles (B,) -> RGB matrices (B, 3, 3) that rotate hue in the IQ plane and leave greys unchanged."""
    cos, sin, one, zero = angle.cos(), angle.sin(), torch.ones_like(angle), torch.zeros_like(angle)
    rotation = torch.stack([one, zero, zero, zero, cos, -sin, zero, sin, cos], -1).unflatten(-1, (3, 3))
    return device_constant(YIQ_TO_RGB, angle.device) @ rotation @ device_constant(RGB_TO_YIQ, angle.device)


@lru_cache(maxsize=32)
def device_constant(values: tuple, device: torch.device) -> Tensor:
    """Copy a constant to a device once; a copy per step would synchronise with the GPU."""
    return torch.tensor(values, device=device)
