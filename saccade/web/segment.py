"""The segmentation tab: a class for every pixel, drawn and counted. Pure, as `look`."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from saccade.engine.evaluate_masks import answer, look_at
from saccade.models.card import Card
from saccade.tasks.segmentation_drawing import class_areas, class_colours, overlay_labels, palette_image
from saccade.tasks.segmentation_inference import InferenceOptions

LARGEST = 640  # pixels of the longer side: the page's pictures are not larger


@dataclass
class Segmented:
    """One picture and the class of each of its pixels."""

    name: str
    model: str
    picture: np.ndarray  # (H, W, 3)
    labels: np.ndarray  # (H, W) uint8
    classes: list[str]

    def areas(self) -> list[dict[str, Any]]:
        """Classes by the share they cover, each with its colour."""
        colours = class_colours(len(self.classes))
        return [row | {"colour": "#{:02x}{:02x}{:02x}".format(*colours[row["class"]])} for row in self.found()]

    def found(self) -> list[dict[str, Any]]:
        return [row | {"share": round(float(row["share"]), 5)} for row in class_areas(self.labels, self.classes)]

    def draw(self, opacity: float = 0.55) -> np.ndarray:
        return overlay_labels(self.picture, self.labels, class_colours(len(self.classes)), min(max(opacity, 0.0), 1.0))

    def label_image(self) -> Image.Image:
        """A PNG whose values are the class numbers."""
        return palette_image(self.labels, class_colours(len(self.classes)))


@torch.inference_mode()
def segment(model: nn.Module, card: Card, picture: Image.Image, name: str = "picture", label: str = "") -> Segmented:
    picture = picture.copy()
    picture.thumbnail((LARGEST, LARGEST), Image.Resampling.BICUBIC)
    device = next(model.parameters()).device
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].to(device)
    seen = look_at(pixels, card.preprocess, card.shorter)
    shares = answer(model, seen, pixels.shape[2:], InferenceOptions(), card.names)
    labels = shares.argmax(1)[0].byte().cpu().numpy()
    return Segmented(name, label or f"{card.name}+{card.head}", np.array(picture), labels, card.names)
