"""One segmenter on one image: label map, overlay and class areas, as the page shows them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from saccade.engine.evaluate_masks import answer, look_at
from saccade.models.card import Card
from saccade.tasks.inference import Inference
from saccade.tasks.segments import areas, class_colours, label_image, overlay

MAX_SIDE = 640  # pixels; the page shows no larger images


@dataclass
class Segmentation:
    """An image and the class of each of its pixels."""

    name: str
    model: str
    image: np.ndarray  # (H, W, 3)
    labels: np.ndarray  # (H, W) uint8
    classes: list[str]

    def areas(self) -> list[dict[str, Any]]:
        """Return the classes by descending area, each with its colour."""
        colours = class_colours(len(self.classes))
        return [
            row
            | {
                "share": round(float(row["share"]), 5),
                "colour": "#{:02x}{:02x}{:02x}".format(*colours[row["class"]]),
            }
            for row in areas(self.labels, self.classes)
        ]

    def draw(self, opacity: float = 0.55) -> np.ndarray:
        return overlay(self.image, self.labels, class_colours(len(self.classes)), min(max(opacity, 0.0), 1.0))

    def label_image(self) -> Image.Image:
        """Return a palette image whose values are the class indices."""
        return label_image(self.labels, class_colours(len(self.classes)))


@torch.inference_mode()
def segment(model: nn.Module, card: Card, image: Image.Image, name: str = "image", label: str = "") -> Segmentation:
    """Segment an image, resized to at most `MAX_SIDE` pixels."""
    image = image.copy()
    image.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.BICUBIC)
    device = next(model.parameters()).device
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].to(device)
    inputs = look_at(pixels, card.preprocess, card.shorter)
    probabilities = answer(model, inputs, pixels.shape[2:], Inference(), card.names)
    labels = probabilities.argmax(1)[0].byte().cpu().numpy()
    return Segmentation(name, label or f"{card.name}+{card.head}", np.array(image), labels, card.names)
