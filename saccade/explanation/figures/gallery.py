"""Gallery, for every family: single tokens, most important first."""

from collections.abc import Mapping

import numpy as np
import torch

from saccade.explanation.drawing.colours import token_colours
from saccade.explanation.drawing.figure import Figure, Panel
from saccade.explanation.drawing.overlay import downscale, draw_boxes, spotlight
from saccade.explanation.observe import Observation, Step
from saccade.tokens.trace import RegionTrace

LEGEND = {
    "occlusion": "Occlusion: how much the class score falls when the token is set to zero.",
    "gradient": "Gradient: derivative of the class score with respect to a factor on the token.",
}


def rank_tokens(importance: Mapping[str, np.ndarray], count: int) -> np.ndarray:
    """Token indices, most important first: by occlusion if available, else by gradient, else in order."""
    values = next((importance[kind] for kind in ("occlusion", "gradient") if kind in importance), np.zeros(count))
    return np.argsort(-values, kind="stable")


def gallery_figure(
    observation: Observation,
    step: Step,
    importance: Mapping[str, np.ndarray],
    class_name: str,
    model_name: str,
    max_tokens: int = 12,
) -> Figure:
    """The `max_tokens` most important tokens of a step, each as a spotlight on the image."""
    ranked = rank_tokens(importance, step.count)[:max_tokens]
    image = downscale(observation.view.canvas)
    maps = step.maps(image.shape[:2], torch.from_numpy(ranked.copy())).cpu().numpy()
    panels = []
    for token, values in zip(ranked, maps, strict=True):
        drawn = spotlight(image, values)
        if isinstance(step.trace, RegionTrace):
            region = step.trace.regions[0, [token]].cpu().numpy()
            drawn = draw_boxes(drawn, region, token_colours(step.colour_indices[[token]]))
        note = "\n".join(f"{kind} {values[token]:+.2g}" for kind, values in importance.items())
        panels.append(Panel(drawn, f"token {token}", note, step.colour(token)))
    order = f", by importance for {class_name}" if importance else ""
    shown = f"{len(ranked)} of {step.count} tokens" if len(ranked) < step.count else f"All {step.count} tokens"
    return Figure(
        "tokens",
        "Maps of single tokens",
        f"{model_name}, {step.title}. {shown}{order}. " + " ".join(LEGEND[kind] for kind in importance),
        panels,
        columns=6 if len(panels) % 8 else 8,
    )
