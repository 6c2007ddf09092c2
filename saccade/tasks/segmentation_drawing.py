"""Draw segmentations: class colours, overlays, palette PNGs, and the area of every class."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image


def class_colours(count: int) -> np.ndarray:
    """(count, 3) uint8: well separated colours, a fixed one for each class index."""
    index = np.arange(count)
    hue = (index * 0.61803398875 + 0.55) % 1  # golden-ratio steps: consecutive hues stay far apart
    value, saturation = 0.95 - 0.25 * (index // 3 % 3) / 2, 0.75 - 0.3 * (index // 9 % 2)
    sector = (hue * 6)[:, None] + np.array([5, 3, 1])
    fraction = np.clip(np.minimum(sector % 6, 4 - sector % 6), 0, 1)
    return np.round(255 * value[:, None] * (1 - saturation[:, None] * fraction)).astype(np.uint8)


def colour_labels(labels: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """labels (H, W) -> colours (H, W, 3), black where unlabelled."""
    return _palette(colours)[labels]


def overlay_labels(image: np.ndarray, labels: np.ndarray, colours: np.ndarray, strength: float = 0.55) -> np.ndarray:
    """The image (H, W, 3) blended with the colours of its labels (H, W), with dark borders between classes."""
    strength = float(strength)  # an int, as parsed from JSON, would keep the blend in uint8
    blend = image * (1 - strength) + colour_labels(labels, colours) * strength
    blend = np.where((labels >= len(colours))[..., None], image, blend)  # unlabelled
    border = np.zeros(labels.shape, bool)
    border[:, 1:] |= labels[:, 1:] != labels[:, :-1]
    border[1:] |= labels[1:] != labels[:-1]
    blend[border] *= 0.35
    return blend.round().astype(np.uint8)


def label_dtype(num_classes: int) -> type[np.unsignedinteger]:
    """The smallest type of an image that holds every class index."""
    return np.uint8 if num_classes <= 256 else np.uint16


def palette_image(labels: np.ndarray, colours: np.ndarray) -> Image.Image:
    """An image whose values are class indices: with a palette of their colours, or 16 bit for more than 256 classes."""
    image = Image.fromarray(labels.astype(label_dtype(len(colours))))
    if len(colours) > 256:
        return image
    image.putpalette(_palette(colours).flatten().tolist())
    return image


def class_areas(labels: np.ndarray, classes: Sequence[str]) -> list[dict[str, Any]]:
    """The classes present and the fraction of the image ("share") each covers, largest first."""
    counts = np.bincount(labels.flatten(), minlength=len(classes))
    order = np.argsort(-counts[: len(classes)], kind="stable").tolist()
    return [
        {"class": index, "name": classes[index], "pixels": int(counts[index]), "share": counts[index] / labels.size}
        for index in order
        if counts[index]
    ]


def _palette(colours: np.ndarray) -> np.ndarray:
    """(256, 3), more for more classes: black beyond the classes."""
    palette = np.zeros((max(256, len(colours)), 3), np.uint8)
    palette[: len(colours)] = colours
    return palette
