"""Tokens one by one, the most important first: what each of them sees."""

from collections.abc import Mapping

import numpy as np
import torch

from saccade.explain.drawing.colours import token_colours
from saccade.explain.drawing.figure import Figure, Panel
from saccade.explain.drawing.overlay import boxes, spotlight
from saccade.explain.observe import Observation, Step
from saccade.tokens.trace import RegionTrace

SMALL = 256  # pixels across a picture of a gallery


def order(importance: Mapping[str, np.ndarray], count: int) -> np.ndarray:
    """Token numbers, the most important first: by occlusion where it was asked, else by gradient, else as they are."""
    values = next((importance[kind] for kind in ("occlusion", "gradient") if kind in importance), np.zeros(count))
    return np.argsort(-values, kind="stable")


def small(picture: np.ndarray, width: int = SMALL) -> np.ndarray:
    """A picture reduced to a gallery's size."""
    from PIL import Image

    if picture.shape[1] <= width:
        return picture
    height = round(picture.shape[0] * width / picture.shape[1])
    return np.array(Image.fromarray(picture).resize((width, height), Image.Resampling.LANCZOS))


def gallery(
    seen: Observation,
    step: Step,
    importance: Mapping[str, np.ndarray],
    answer: str,
    model_name: str,
    most: int = 12,
) -> Figure:
    """The `most` important tokens of a step, each as the light it throws on the picture."""
    ranked = order(importance, step.count)[:most]
    picture = small(seen.view.picture)
    maps = step.maps(picture.shape[:2], torch.from_numpy(ranked.copy())).cpu().numpy()
    panels = []
    for token, light in zip(ranked, maps, strict=True):
        lit = spotlight(picture, light)
        colour = token_colours(step.numbers[[token]])
        if isinstance(step.trace, RegionTrace):
            lit = boxes(lit, step.trace.regions[0, [token]].cpu().numpy(), colour)
        note = "\n".join(f"{kind} {values[token]:+.2g}" for kind, values in importance.items())
        panels.append(Panel(lit, f"token {token}", note, tuple(int(c) for c in colour[0])))
    sorted_by = f", sorted by what they do for {answer}" if importance else ""
    shown = f"{len(ranked)} of {step.count} tokens" if len(ranked) < step.count else f"All {step.count} tokens"
    explained = {
        "occlusion": "Occlusion: how much the score falls when the token is zeroed.",
        "gradient": "Gradient: the slope of the score when the token is turned down.",
    }
    return Figure(
        "tokens",
        "What single tokens see",
        f"{model_name}, {step.title}. {shown}{sorted_by}. " + " ".join(explained[kind] for kind in importance),
        panels,
        columns=6 if len(panels) % 8 else 8,
    )
