"""One segmenter on one image: label map, overlay and class areas, as the page shows them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from saccade.engine.tasks.evaluate_segmenter import predict_batch, preprocess_images
from saccade.models.card import Card
from saccade.tasks.segmentation_drawing import class_areas, class_colours, overlay_labels, palette_image
from saccade.tasks.segmentation_inference import InferenceOptions

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
            for row in class_areas(self.labels, self.classes)
        ]

    def draw(self, opacity: float = 0.55) -> np.ndarray:
        return overlay_labels(self.image, self.labels, class_colours(len(self.classes)), min(max(opacity, 0.0), 1.0))

    def palette_image(self) -> Image.Image:
        """Return a palette image whose values are the class indices."""
        return palette_image(self.labels, class_colours(len(self.classes)))


@torch.inference_mode()
def segment_image(
    model: nn.Module, card: Card, image: Image.Image, name: str = "image", label: str = ""
) -> Segmentation:
    """Segment an image, resized to at most `MAX_SIDE` pixels."""
    image = image.copy()
    image.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.BICUBIC)
    device = next(model.parameters()).device
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].to(device)
    inputs = preprocess_images(pixels, card.preprocess, card.shorter)
    probabilities = predict_batch(model, inputs, pixels.shape[2:], InferenceOptions(), card.names)
    labels = probabilities.argmax(1)[0].byte().cpu().numpy()
    return Segmentation(name, label or f"{card.name}+{card.head}", np.array(image), labels, card.names)
