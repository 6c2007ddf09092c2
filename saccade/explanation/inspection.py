"""One classifier on one image: predictions, token maps and token importance, as the page shows them."""

import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from saccade.data.transforms.batch import normalize
from saccade.explanation.drawing.colours import token_colours
from saccade.explanation.drawing.figure import Figure, Panel
from saccade.explanation.drawing.overlay import blend, border_mask, draw_boxes, spotlight
from saccade.explanation.figures.mosaic import paint_mosaic, strongest_tokens
from saccade.explanation.image_explanation import resolve_target
from saccade.explanation.observe import Observation, Step, eval_mode, observe
from saccade.explanation.scores.importance import Score, gradient_importance, occlusion_importance
from saccade.explanation.subject import Subject
from saccade.tokens.trace import RegionTrace

MARK = 255, 225, 60  # colour of the outline of the chosen token
MARGIN = 0.2  # a prediction is certain if its probability is this far from chance towards 1


@dataclass
class Stage:
    """One position of the stage slider."""

    step: Step
    size: tuple[int, int]  # (H, W) of the displayed image
    importance: np.ndarray | None  # (M,), gradient of the target score w.r.t. each token; None without classes

    @cached_property
    def strongest_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Strongest token per pixel (H, W), -1 where no token has weight, and its margin in [0, 1]."""
        labels, margin = strongest_tokens(self.step, self.size)
        return labels.astype(np.int16), margin.astype(np.float16)

    @property
    def labels(self) -> np.ndarray:
        return self.strongest_tokens[0]

    @property
    def title(self) -> str:
        return self.step.title


@dataclass
class Inspection:
    """The result of `inspect_image`."""

    name: str  # file name of the image
    subject: Subject
    observation: Observation
    inputs: Tensor  # (1, 3, H, W), normalised
    predictions: list[tuple[str, float]]  # class name, probability
    target: str  # the class that importance refers to
    score: Score | None
    stages: list[Stage]
    seconds: float  # forward pass

    @property
    def image(self) -> np.ndarray:
        return self.observation.view.canvas

    @property
    def doubt(self) -> str:
        """Why the image may show none of the model's classes; empty for a certain prediction.

        Decided by the largest probability (the baseline of Hendrycks and Gimpel, arXiv 1610.02136); of a multi-label
        model it is compared with 0.5.
        """
        count = int(getattr(self.subject.model, "num_classes", 0) or 0)
        if not self.predictions or not self.subject.trained or count < 2:
            return ""
        (_, largest), limit = self.predictions[0], 1 / count + MARGIN * (1 - 1 / count)
        limit = 0.5 if self.subject.multi_label else limit
        if largest >= limit:
            return ""
        return (
            f"Uncertain: the most probable class has {largest:.0%}, below {limit:.0%}. The image may show none of the "
            f"{count} classes the model knows."
        )


def inspect_image(subject: Subject, image: Image.Image, name: str = "image") -> Inspection:
    """Run forward once, and backward once for the importance of the tokens."""
    view = subject.view(image, name)
    start = time.perf_counter()
    observation = observe(subject.model, view, subject.mean, subject.std)
    seconds = time.perf_counter() - start
    target = resolve_target(subject, observation.output, None)
    device = next(subject.model.parameters()).device
    inputs = normalize(view.image[None], subject.mean, subject.std).to(device)
    gradients: list[Tensor] = []
    if target.score is not None:
        try:
            with eval_mode(subject.model):
                gradients = gradient_importance(
                    subject.model, inputs, target.score, [step.count for step in observation.steps]
                )
        except ValueError:  # no token of this model can be scaled, so none has a gradient
            gradients = []
    stages = []
    for step in observation.main:
        importance = gradients[step.index][0].cpu().numpy() if gradients else None
        stages.append(Stage(step, view.canvas.shape[:2], importance))
    observation = observation._replace(output=None)
    return Inspection(
        name, subject, observation, inputs, target.predictions, target.target, target.score, stages, seconds
    )


def get_stage(inspection: Inspection, number: int) -> Stage:
    """Return a stage by its number, counted from 1 and clamped to the existing ones."""
    return inspection.stages[min(max(int(number), 1), len(inspection.stages)) - 1]


def mosaic_image(inspection: Inspection, number: int, opacity: float = 1.0, token: int | None = None) -> np.ndarray:
    """Return the image with every pixel in the colour of its strongest token, and the outline of one `token`."""
    stage = get_stage(inspection, number)
    labels, margin = stage.strongest_tokens
    painted = paint_mosaic(inspection.image, labels.astype(int), margin.astype(np.float64), stage.step.colour_indices)
    drawn = blend(inspection.image, painted, min(max(opacity, 0.0), 1.0))
    if token is not None:
        drawn[border_mask(labels == token, 4)] = 0
        drawn[border_mask(labels == token, 2)] = MARK
    return drawn


def token_at(inspection: Inspection, number: int, x: float, y: float) -> int:
    """Return the strongest token at x, y in [0, 1], or the nearest one where no token has weight."""
    labels = get_stage(inspection, number).labels
    row, column = (min(max(int(v * side), 0), side - 1) for v, side in zip((y, x), labels.shape, strict=True))
    if labels[row, column] >= 0:
        return int(labels[row, column])
    rows, columns = np.nonzero(labels >= 0)
    if not len(rows):
        return 0
    return int(labels[rows, columns][((rows - row) ** 2 + (columns - column) ** 2).argmin()])


def default_token(inspection: Inspection, number: int) -> int:
    """Return the most important token, or without classes the one that covers most pixels."""
    stage = get_stage(inspection, number)
    if stage.importance is not None:
        return int(stage.importance.argmax())
    labels = stage.labels[stage.labels >= 0]
    return int(np.bincount(labels).argmax()) if len(labels) else 0


def clamp_token(inspection: Inspection, number: int, token: int) -> int:
    """Clamp a token index to the tokens of a stage."""
    return min(max(int(token), 0), get_stage(inspection, number).step.count - 1)


def token_image(inspection: Inspection, number: int, token: int, opacity: float = 1.0) -> np.ndarray:
    """Return the image, darkened where the map of one token is low."""
    step, token = get_stage(inspection, number).step, clamp_token(inspection, number, token)
    token_map = step.maps(inspection.image.shape[:2], torch.tensor([token]))[0].cpu().numpy()
    drawn = blend(inspection.image, spotlight(inspection.image, token_map), min(max(opacity, 0.0), 1.0))
    if isinstance(step.trace, RegionTrace):
        region = step.trace.regions[0, [token]].cpu().numpy()
        drawn = draw_boxes(drawn, region, token_colours(step.colour_indices[[token]]), width=3, outline=True)
    return drawn


def summarize_token(inspection: Inspection, number: int, token: int) -> dict[str, Any]:
    """Return the area of one token, its gradient and rank, and the drop of the target logit without it."""
    stage, token = get_stage(inspection, number), clamp_token(inspection, number, token)
    summary: dict[str, Any] = {
        "stage": stage.title,
        "token": token,
        "tokens": stage.step.count,
        "area": round(float((stage.labels == token).mean()), 4),
        "colour": "#{:02x}{:02x}{:02x}".format(*token_colours(stage.step.colour_indices[[token]])[0]),
        "target": inspection.target,
    }
    if stage.importance is None or inspection.score is None:
        return summary
    model, step = inspection.subject.model, stage.step
    with eval_mode(model):
        drop = occlusion_importance(model, inspection.inputs, inspection.score, step.index, step.count, tokens=[token])
    summary |= {
        "gradient": round(float(stage.importance[token]), 5),
        "rank": int((stage.importance > stage.importance[token]).sum()) + 1,
        "drop": round(float(drop[0]), 5),  # of the target logit when the token is set to zero
    }
    return summary


def summarize(inspection: Inspection) -> dict[str, Any]:
    """Return an inspection as JSON-serialisable data."""
    grid = inspection.observation.steps[0].trace.size
    return {
        "image": inspection.name,
        "model": inspection.subject.name,
        "weights": inspection.subject.weights,
        "trained": inspection.subject.trained,
        "input_size": [int(side) for side in inspection.inputs.shape[:1:-1]],  # width, height
        "milliseconds": round(1000 * inspection.seconds, 1),
        "tokens": inspection.stages[0].step.count,
        "pixels": int(grid[0] * grid[1]),
        "doubt": inspection.doubt,
        "predictions": [{"class": name, "probability": round(value, 6)} for name, value in inspection.predictions],
        "stages": [
            {
                "title": stage.title,
                "tokens": stage.step.count,
                "grid": [int(side) for side in stage.step.trace.size],
                "importance": None if stage.importance is None else [round(float(v), 6) for v in stage.importance],
            }
            for stage in inspection.stages
        ],
    }


def summary_sheet(inspection: Inspection, number: int, token: int) -> Image.Image:
    """Return the figure to download: image, mosaic and one token, with the predictions below."""
    stage, token = get_stage(inspection, number), clamp_token(inspection, number, token)
    red, green, blue = (int(channel) for channel in token_colours(stage.step.colour_indices[[token]])[0])
    predictions = ", ".join(f"{name} {value:.0%}" for name, value in inspection.predictions[:3])
    warning = "" if inspection.subject.trained else " Randomly initialised weights: predictions are meaningless."
    return Figure(
        "inspection",
        f"{inspection.subject.name} on {inspection.name}",
        (f"Predictions: {predictions}. " if predictions else "")
        + f"{stage.step.count} tokens, {stage.title}.{warning}",
        [
            Panel(inspection.image, "image"),
            Panel(mosaic_image(inspection, number, token=token), f"mosaic, {stage.title}"),
            Panel(token_image(inspection, number, token), f"token {token}", colour=(red, green, blue)),
        ],
        columns=3,
    ).image(460)
