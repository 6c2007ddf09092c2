"""What a detector found, on the picture: the answers that the tokens of its backbone lead to."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from saccade.explain.drawing.figure import Figure, Panel
from saccade.explain.images import View
from saccade.explain.observe import evaluating
from saccade.tasks.detections import describe_detections, draw_detections

SURE = 0.5  # score from which on a detection is drawn


def found_figure(detector: nn.Module, view: View, labels: Sequence[str], model_name: str) -> Figure:
    """Boxes, names, scores and masks of all detections that are sure enough."""
    device = next(detector.parameters()).device
    with torch.inference_mode(), evaluating(detector):
        answer: dict[str, Tensor] = detector([view.image.to(device)])[0]
    sure = answer["scores"] >= SURE
    answer = enlarge({key: value[sure].cpu() for key, value in answer.items()}, view)
    kinds = Counter(entry["name"] for entry in describe_detections(answer, labels))
    said = ", ".join(f"{count} {name}" for name, count in kinds.most_common()) or "nothing"
    picture = draw_detections(Image.fromarray(view.picture), answer, labels, SURE)
    caption = f"{model_name} finds {said} with a score of at least {SURE}."
    panels = [Panel(view.picture, view.name), Panel(np.array(picture), said)]
    return Figure("found", "What the detector finds", caption, panels, columns=2)


def enlarge(answer: dict[str, Tensor], view: View) -> dict[str, Tensor]:
    """From the pixels of the picture that the model saw to those of the one that is drawn."""
    (height, width), (tall, wide) = view.image.shape[-2:], view.picture.shape[:2]
    scale = torch.tensor([wide / width, tall / height] * 2)
    larger = answer | {"boxes": answer["boxes"] * scale}
    if "masks" in answer and len(answer["masks"]):
        larger["masks"] = F.interpolate(answer["masks"], (tall, wide), mode="bilinear")  # (n, 1, H, W)
    return larger
