"""One picture through one model, and all that the page shows of it. Pure: a picture in, pictures and numbers out."""

import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from saccade.explain.drawing.colours import token_colours
from saccade.explain.drawing.figure import Figure, Panel
from saccade.explain.drawing.overlay import blend, draw_boxes, spotlight
from saccade.explain.figures.mosaic import paint_mosaic, strongest_tokens
from saccade.explain.image_explanation import resolve_target
from saccade.explain.images import load_view
from saccade.explain.observe import Observation, Step, eval_mode, observe
from saccade.explain.scores.importance import Score, gradient_importance, occlusion_importance
from saccade.explain.subject import Subject
from saccade.tokens.trace import RegionTrace


@dataclass
class Stage:
    """One step of the slider."""

    step: Step
    size: tuple[int, int]  # of the picture that is drawn on
    importance: np.ndarray | None  # (M,), the gradient of the answer by each token; None without classes

    @cached_property
    def owners(self) -> tuple[np.ndarray, np.ndarray]:
        """The strongest token of every pixel (H, W), -1 where none looks, and its lead in [0, 1]; made on demand."""
        labels, lead = strongest_tokens(self.step, self.size)
        return labels.astype(np.int16), lead.astype(np.float16)

    @property
    def labels(self) -> np.ndarray:
        return self.owners[0]

    @property
    def title(self) -> str:
        return self.step.title


@dataclass
class Look:
    """What one model said and did about one picture."""

    name: str  # of the picture
    subject: Subject
    seen: Observation
    images: Tensor  # (1, 3, H, W), normalised
    answers: list[tuple[str, float]]
    target: str  # the class that importance is about
    score: Score | None
    stages: list[Stage]
    seconds: float  # of the forward pass

    @property
    def picture(self) -> np.ndarray:
        return self.seen.view.canvas


def look_at(subject: Subject, picture: Image.Image, name: str = "picture") -> Look:
    """Run the model once, and once backwards for the importance of its tokens."""
    view = load_view(picture, subject.size, name)
    start = time.perf_counter()
    seen = observe(subject.model, view, subject.mean, subject.std)
    seconds = time.perf_counter() - start
    answers, number, score, *_ = resolve_target(subject, seen.output, None)
    images = subject.prepare(view.image[None])
    gradients: list[Tensor] = []
    if score is not None:
        try:
            with eval_mode(subject.model):
                gradients = gradient_importance(subject.model, images, score, [step.count for step in seen.steps])
        except ValueError:  # a model whose tokens cannot be turned down
            gradients = []
    stages = []
    for step in seen.main:
        importance = gradients[step.index][0].cpu().numpy() if gradients else None
        stages.append(Stage(step, view.canvas.shape[:2], importance))
    target = subject.label(number) if number is not None else ""
    return Look(name, subject, seen._replace(output=None), images, answers, target, score, stages, seconds)


def stage_of(look: Look, number: int) -> Stage:
    """Counted from 1, as the slider does; beyond the last is the last."""
    return look.stages[min(max(int(number), 1), len(look.stages)) - 1]


def mosaic_picture(look: Look, stage: int, opacity: float = 1.0) -> np.ndarray:
    """Every pixel in the colour of its strongest token, over the photograph."""
    at = stage_of(look, stage)
    labels, lead = at.owners
    painted = paint_mosaic(look.picture, labels.astype(int), lead.astype(np.float64), at.step.colour_indices)
    return blend(look.picture, painted, min(max(opacity, 0.0), 1.0))


def token_at(look: Look, stage: int, x: float, y: float) -> int:
    """The token that owns a place, x and y in [0, 1]; where none does, the nearest that does."""
    labels = stage_of(look, stage).labels
    row, column = (min(max(int(v * side), 0), side - 1) for v, side in zip((y, x), labels.shape, strict=True))
    if labels[row, column] >= 0:
        return int(labels[row, column])
    rows, columns = np.nonzero(labels >= 0)
    if not len(rows):
        return 0
    return int(labels[rows, columns][((rows - row) ** 2 + (columns - column) ** 2).argmin()])


def first_token(look: Look, stage: int) -> int:
    """The most important one, or the one that owns most pixels."""
    at = stage_of(look, stage)
    if at.importance is not None:
        return int(at.importance.argmax())
    owned = at.labels[at.labels >= 0]
    return int(np.bincount(owned).argmax()) if len(owned) else 0


def check_token(look: Look, stage: int, token: int) -> int:
    """A number that exists."""
    return min(max(int(token), 0), stage_of(look, stage).step.count - 1)


def token_picture(look: Look, stage: int, token: int, opacity: float = 1.0) -> np.ndarray:
    """The photograph lit where one token looks."""
    step, token = stage_of(look, stage).step, check_token(look, stage, token)
    light = step.maps(look.picture.shape[:2], torch.tensor([token]))[0].cpu().numpy()
    lit = blend(look.picture, spotlight(look.picture, light), min(max(opacity, 0.0), 1.0))
    if isinstance(step.trace, RegionTrace):
        region = step.trace.regions[0, [token]].cpu().numpy()
        lit = draw_boxes(lit, region, token_colours(step.colour_indices[[token]]), width=3, outline=True)
    return lit


def token_facts(look: Look, stage: int, token: int) -> dict[str, Any]:
    """What one token owns, and what it does for the answer: its gradient, its rank, and the answer without it."""
    at, token = stage_of(look, stage), check_token(look, stage, token)
    facts: dict[str, Any] = {
        "stage": at.title,
        "token": token,
        "tokens": at.step.count,
        "owns": round(float((at.labels == token).mean()), 4),
        "colour": "#{:02x}{:02x}{:02x}".format(*token_colours(at.step.colour_indices[[token]])[0]),
        "answer": look.target,
    }
    if at.importance is None or look.score is None:
        return facts
    with eval_mode(look.subject.model):
        drop = occlusion_importance(
            look.subject.model, look.images, look.score, at.step.index, at.step.count, tokens=[token]
        )
    facts |= {
        "gradient": round(float(at.importance[token]), 5),
        "rank": int((at.importance > at.importance[token]).sum()) + 1,
        "drop": round(float(drop[0]), 5),  # of the answer's logit when the token is zeroed
    }
    return facts


def facts(look: Look) -> dict[str, Any]:
    """All numbers of a look, for machines."""
    grid = look.seen.steps[0].trace.size
    return {
        "picture": look.name,
        "model": look.subject.name,
        "weights": look.subject.weights,
        "trained": look.subject.trained,
        "looked_at": [int(side) for side in look.images.shape[:1:-1]],  # width, height
        "milliseconds": round(1000 * look.seconds, 1),
        "tokens": look.stages[0].step.count,
        "pixels": int(grid[0] * grid[1]),
        "answers": [{"class": name, "probability": round(chance, 6)} for name, chance in look.answers],
        "stages": [
            {
                "title": at.title,
                "tokens": at.step.count,
                "grid": [int(side) for side in at.step.trace.size],
                "importance": None if at.importance is None else [round(float(v), 6) for v in at.importance],
            }
            for at in look.stages
        ],
    }


def sheet(look: Look, stage: int, token: int) -> Image.Image:
    """The picture to download: photograph, mosaic and one token, with the answers below."""
    at, token = stage_of(look, stage), check_token(look, stage, token)
    colour = at.step.colour(token)
    said = ", ".join(f"{name} {chance:.0%}" for name, chance in look.answers[:3])
    warning = "" if look.subject.trained else " Fresh weights: the answers mean nothing."
    return Figure(
        "look",
        f"{look.subject.name} looks at {look.name}",
        (f"It says: {said}. " if said else "") + f"{at.step.count} tokens, {at.title}.{warning}",
        [
            Panel(look.picture, "photograph"),
            Panel(mosaic_picture(look, stage), f"mosaic, {at.title}"),
            Panel(token_picture(look, stage, token), f"token {token}", colour=colour),
        ],
        columns=3,
    ).image(460)
