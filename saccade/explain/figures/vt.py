"""VT, Figures 5, 7, 8: each token's assignment over the image, red high, blue low. Works for every assignment."""

from collections.abc import Sequence

import numpy as np
import torch

from saccade.explain.drawing.colours import token_colours
from saccade.explain.drawing.figure import Figure, Panel
from saccade.explain.drawing.overlay import heat
from saccade.explain.figures.gallery import small
from saccade.explain.observe import Observation, Step


def assignment_maps(
    seen: Observation, step: Step, model_name: str, tokens: Sequence[int] | np.ndarray | None = None
) -> Figure:
    """One panel per token (VT-74): lowest value of its own map blue, highest red."""
    tokens = np.arange(step.count) if tokens is None else np.asarray(tokens)
    picture = small(seen.view.picture)
    maps = step.maps(picture.shape[:2], torch.from_numpy(tokens)).cpu().numpy()
    panels = [
        Panel(
            heat(picture, values),
            f"token {token}",
            colour=tuple(int(c) for c in token_colours(step.numbers[[token]])[0]),
        )
        for token, values in zip(tokens, maps, strict=True)
    ]
    shown = f"{len(tokens)} of {step.count}" if len(tokens) < step.count else f"all {step.count}"
    return Figure(
        "assignment",
        "How much each pixel counts for a token",
        f"{model_name}, {step.title}, {shown} tokens. Red: the token reads this pixel most; blue: least "
        "(each map from its own lowest to its own highest value).",
        panels,
        columns=6 if len(tokens) % 8 else 8,
    )
