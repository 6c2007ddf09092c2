"""VT Figs. 5, 7, 8: the assignment of each token over the image. Works for every assignment."""

from collections.abc import Sequence

import numpy as np
import torch

from saccade.explanation.drawing.figure import Figure, Panel
from saccade.explanation.drawing.overlay import downscale, draw_heat
from saccade.explanation.observe import Observation, Step


def assignment_figure(
    observation: Observation, step: Step, model_name: str, tokens: Sequence[int] | np.ndarray | None = None
) -> Figure:
    """One panel per token: the lowest value of its map blue, the highest red."""
    tokens = np.arange(step.count) if tokens is None else np.asarray(tokens)
    image = downscale(observation.view.canvas)
    maps = step.maps(image.shape[:2], torch.from_numpy(tokens)).cpu().numpy()
    panels = [
        Panel(draw_heat(image, values), f"token {token}", colour=step.colour(token))
        for token, values in zip(tokens, maps, strict=True)
    ]
    shown = f"{len(tokens)} of {step.count}" if len(tokens) < step.count else f"all {step.count}"
    return Figure(
        "assignment",
        "Assignment of pixels to tokens",
        f"{model_name}, {step.title}, {shown} tokens. Red: pixels with the largest weight in the token; blue: the "
        "smallest (each map scaled to its own minimum and maximum).",
        panels,
        columns=6 if len(tokens) % 8 else 8,
    )
