"""The same augmentation for whole batches where they live, the GPU if there is one: pictures and masks kept there.

Scale, crop and mirror are one affine map, read once from the picture (bilinear) and once from the mask (nearest).
Every pair draws its own numbers, and nothing waits for the device.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.data.sources.masks import IGNORE
from saccade.data.transforms.batch import affine, blend, normalise

TO_YIQ = ((0.299, 0.587, 0.114), (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))  # brightness, and two of colour
FROM_YIQ = tuple(map(tuple, np.linalg.inv(TO_YIQ).tolist()))
LOOKS = 16  # a window is judged by this many samples of its mask in each direction


class PairAugment:
    """uint8 pictures (B, 3, h, w) and masks (B, h, w) -> normalised (B, 3, S, S) and (B, S, S) int64."""

    def __init__(
        self,
        size: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        base: int | None = None,
        scale: tuple[float, float] = (0.5, 2.0),
        most: float = 0.75,
        tries: int = 10,
        flip: float = 0.5,
        distort: bool = True,
        mirrored: Sequence[int] = (),
    ):
        self.size, self.mean, self.std, self.base = size, mean, std, base
        self.scale, self.most, self.tries, self.flip, self.distort = scale, most, tries, flip, distort
        self.mirrored = (*mirrored, *range(len(mirrored), 256))

    def __call__(self, images: Tensor, masks: Tensor, dice: torch.Generator) -> tuple[Tensor, Tensor]:
        batch, _, height, width = images.shape
        draw = torch.rand(2, batch, device=images.device, generator=dice)
        factor = self.scale[0] + draw[0] * (self.scale[1] - self.scale[0])
        if self.base is not None:
            factor = factor * (self.base / min(height, width))
        high, wide = self.size / (factor * height), self.size / (factor * width)  # of the window, in pictures
        y, x = self._place(masks, high, wide, dice)
        mirror = torch.where(draw[1] < self.flip, -1.0, 1.0)
        window = affine(mirror * wide, 0.0, x, 0.0, high, y)
        pixels = images.float() / 255
        if self.distort:
            pixels = distort(pixels, dice)
        grid = window_grid(window, self.size)
        pixels, answers = read_pixels(normalise(pixels, self.mean, self.std), grid), read_masks(masks, grid).long()
        swapped = constant(self.mirrored, answers.device)[answers]
        return pixels, torch.where((mirror < 0)[:, None, None], swapped, answers)

    def _place(self, masks: Tensor, high: Tensor, wide: Tensor, dice: torch.Generator) -> tuple[Tensor, Tensor]:
        """Centres (B,) from -1 to 1 of windows in which no class has more than its share, or of the last one drawn."""
        batch, tries, device = masks.shape[0], self.tries, masks.device
        high, wide = high[:, None].expand(-1, tries), wide[:, None].expand(-1, tries)
        draw = torch.rand(2, batch, tries, device=device, generator=dice) * 2 - 1
        y = draw[0] * (1 - high).clamp(min=0) + (high - 1).clamp(min=0)  # what is smaller is padded at the bottom
        x = draw[1] * (1 - wide).clamp(min=0) + (wide - 1).clamp(min=0)
        windows = affine(wide.flatten(), 0.0, x.flatten(), 0.0, high.flatten(), y.flatten())
        grid = window_grid(windows, LOOKS).view(batch, tries * LOOKS, LOOKS, 2)
        seen = read_masks(masks, grid).long().view(batch * tries, -1)
        counts = torch.zeros(batch * tries, 256, device=device)
        counts = counts.scatter_add_(1, seen, torch.ones(seen.shape, device=device))[:, :IGNORE]
        good = (counts.amax(1) <= self.most * counts.sum(1)) & ((counts > 0).sum(1) > 1)
        good = good.view(batch, tries)
        good[:, -1] = True
        first = good.float().argmax(1, keepdim=True)
        return y.gather(1, first)[:, 0], x.gather(1, first)[:, 0]


def window_grid(window: Tensor, size: int) -> Tensor:
    """Where in the picture the pixels of windows (B, 3, 3) lie: (B, S, S, 2)."""
    return F.affine_grid(window[:, :2], [window.shape[0], 1, size, size], align_corners=False)


def read_pixels(pixels: Tensor, grid: Tensor) -> Tensor:
    """pixels (B, C, h, w) at the places (B, H, W, 2) -> (B, C, H, W); beyond the edge lies zero."""
    return F.grid_sample(pixels, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def read_masks(masks: Tensor, grid: Tensor) -> Tensor:
    """The same for masks (B, h, w), by the nearest pixel; beyond the edge nothing is labelled."""
    shifted = masks[:, None].float() - IGNORE  # so that zero, which lies beyond the edge, is "not labelled"
    return F.grid_sample(shifted, grid, mode="nearest", padding_mode="zeros", align_corners=False)[:, 0] + IGNORE


def distort(pixels: Tensor, dice: torch.Generator) -> Tensor:
    """Brightness, contrast, saturation and hue, each in half of the pictures; pixels (B, 3, h, w) from 0 to 1."""
    batch, device = pixels.shape[0], pixels.device
    draw = torch.rand(4, batch, device=device, generator=dice) * 2 - 1
    draw = torch.where(torch.rand(4, batch, device=device, generator=dice) < 0.5, draw, 0.0)
    pixels = (pixels + (32 / 255) * draw[0][:, None, None, None]).clamp(0, 1)
    pixels = blend(pixels, "contrast", 1 + 0.5 * draw[1])
    pixels = blend(pixels, "saturation", 1 + 0.5 * draw[2])
    return torch.einsum("bij,bjhw->bihw", turn_hue(math.radians(18) * draw[3]), pixels).clamp(0, 1)


def turn_hue(angle: Tensor) -> Tensor:
    """Colour matrices (B, 3, 3) that turn hues by angles (B,) and leave greys alone."""
    cos, sin, one, zero = angle.cos(), angle.sin(), torch.ones_like(angle), torch.zeros_like(angle)
    turn = torch.stack([one, zero, zero, zero, cos, -sin, zero, sin, cos], -1).unflatten(-1, (3, 3))
    return constant(FROM_YIQ, angle.device) @ turn @ constant(TO_YIQ, angle.device)


@lru_cache(maxsize=32)
def constant(values: tuple, device: torch.device) -> Tensor:
    """Copied to the device once: a copy a step would make the processor wait."""
    return torch.tensor(values, device=device)
