"""Predictions of a detector on the image."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from saccade.explanation.drawing.figure import Figure, Panel
from saccade.explanation.images import View
from saccade.explanation.observe import eval_mode
from saccade.tasks.detection_drawing import describe_detections, draw_detections

MIN_SCORE = 0.5  # of a detection that is drawn


def detection_figure(detector: nn.Module, view: View, labels: Sequence[str], model_name: str) -> Figure:
    """Boxes, names, scores and masks of the detections with a score of at least MIN_SCORE."""
    device = next(detector.parameters()).device
    with torch.inference_mode(), eval_mode(detector):
        prediction: dict[str, Tensor] = detector([view.image.to(device)])[0]
    confident = prediction["scores"] >= MIN_SCORE
    prediction = scale_detections({key: value[confident].cpu() for key, value in prediction.items()}, view)
    counts = Counter(entry["name"] for entry in describe_detections(prediction, labels))
    objects = ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "nothing"
    drawn = draw_detections(Image.fromarray(view.canvas), prediction, labels, MIN_SCORE)
    caption = f"{model_name} detects {objects} with a score of at least {MIN_SCORE}."
    panels = [Panel(view.canvas, view.name), Panel(np.array(drawn), objects)]
    return Figure("detections", "Detections", caption, panels, columns=2)


def scale_detections(prediction: dict[str, Tensor], view: View) -> dict[str, Tensor]:
    """Boxes and masks from the pixels of the model's input to those of the canvas."""
    (height, width), (canvas_height, canvas_width) = view.image.shape[-2:], view.canvas.shape[:2]
    scale = torch.tensor([canvas_width / width, canvas_height / height] * 2)
    scaled = prediction | {"boxes": prediction["boxes"] * scale}
    if "masks" in prediction and len(prediction["masks"]):
        size = canvas_height, canvas_width
        scaled["masks"] = F.interpolate(prediction["masks"], size, mode="bilinear")  # (n, 1, H, W)
    return scaled
