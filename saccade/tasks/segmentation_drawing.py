"""A segmentation made readable: colours, the picture under them, and how much of it each class covers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

UNLABELLED = (0, 0, 0)


def class_colours(count: int) -> np.ndarray:
    """(count, 3) uint8: colours far apart, the first ones farthest; the same for the same class number everywhere."""
    numbers = np.arange(count)
    hue = (numbers * 0.61803398875 + 0.55) % 1  # the golden section never comes close to where it has been
    bright, strong = 0.95 - 0.25 * (numbers // 3 % 3) / 2, 0.75 - 0.3 * (numbers // 9 % 2)
    sector = (hue * 6)[:, None] + np.array([5, 3, 1])
    share = np.clip(np.minimum(sector % 6, 4 - sector % 6), 0, 1)
    return np.round(255 * bright[:, None] * (1 - strong[:, None] * share)).astype(np.uint8)


def colour_labels(labels: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """labels (H, W) -> their colours (H, W, 3), black where nothing is labelled."""
    table = np.zeros((256, 3), np.uint8)
    table[: len(colours)] = colours
    return table[labels]


def overlay_labels(picture: np.ndarray, labels: np.ndarray, colours: np.ndarray, strength: float = 0.55) -> np.ndarray:
    """The picture (H, W, 3) under the colours of its labels (H, W), with a dark line where two classes meet."""
    strength = float(strength)  # a whole number, as JSON brings it, would leave bytes that cannot be darkened
    mixed = picture * (1 - strength) + colour_labels(labels, colours) * strength
    mixed = np.where((labels == 255)[..., None], picture, mixed)
    edge = np.zeros(labels.shape, bool)
    edge[:, 1:] |= labels[:, 1:] != labels[:, :-1]
    edge[1:] |= labels[1:] != labels[:-1]
    mixed[edge] *= 0.35
    return mixed.round().astype(np.uint8)


def palette_image(labels: np.ndarray, colours: np.ndarray) -> Image.Image:
    """A PNG whose values are the class numbers and whose palette shows them."""
    image = Image.fromarray(labels.astype(np.uint8))
    table = np.zeros((256, 3), np.uint8)
    table[: len(colours)] = colours
    image.putpalette(table.flatten().tolist())
    return image


def class_areas(labels: np.ndarray, classes: Sequence[str]) -> list[dict[str, Any]]:
    """Classes by the share of the picture they cover, the largest first; those without a pixel are left out."""
    counts = np.bincount(labels.flatten(), minlength=len(classes))
    found = [number for number in np.argsort(-counts[: len(classes)], kind="stable").tolist() if counts[number]]
    return [
        {"class": number, "name": classes[number], "pixels": int(counts[number]), "share": counts[number] / labels.size}
        for number in found
    ]
