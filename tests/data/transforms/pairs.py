"""An image and a mask that can be compared pixel by pixel."""

import numpy as np
import torch
from PIL import Image

from saccade.data.sources.masks import IGNORE


def encoded_pair(height: int = 60, width: int = 80) -> tuple[Image.Image, np.ndarray]:
    """An image whose red channel encodes the class of every pixel, 50 levels apart, in blocks of 20 px."""
    y, x = np.mgrid[:height, :width]
    mask = ((y // 20 + x // 20) % 4).astype(np.uint8)
    image = np.zeros((height, width, 3), np.uint8)
    image[..., 0] = mask * 50 + 20
    return Image.fromarray(image), mask


def agreement(pixels: torch.Tensor, labels: torch.Tensor) -> float:
    """Fraction of labelled pixels whose red still encodes their class; resizing blurs the edges of blocks."""
    red, labelled = pixels[..., 0, :, :].float(), labels != IGNORE
    decoded = ((red - 20) / 50).round()
    return (decoded[labelled] == labels[labelled]).float().mean().item()


def corner_mask() -> np.ndarray:
    """Class 1 in one corner of a large field of class 0."""
    mask = np.zeros((100, 100), np.uint8)
    mask[:30, :30] = 1
    return mask
