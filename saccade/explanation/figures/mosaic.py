"""Mosaic, for every family: each pixel in the colour of its strongest token."""

import numpy as np
import torch

from saccade.explanation.drawing.alignment import resample_maps
from saccade.explanation.drawing.colours import token_colours
from saccade.explanation.drawing.figure import Figure, Panel
from saccade.explanation.drawing.overlay import blend, draw_borders, to_grey
from saccade.explanation.observe import Observation, Step, super_token_indices
from saccade.tokens.trace import AssociationTrace, expect_trace

MAX_SMOOTH = 256  # super tokens whose maps are interpolated; more are compared per cell
MIN_ALPHA, MAX_ALPHA = 0.3, 0.8  # opacity where all tokens are equal, and where one token has all the weight


def strongest_tokens(step: Step, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Index of the strongest token at every pixel (-1 if no token covers it) and its dominance, both of `size`.

    Dominance is the token's fraction of the pixel's total weight, rescaled to [0, 1]: 0 if all tokens are equal.
    """
    if isinstance(step.trace, AssociationTrace) and step.count > MAX_SMOOTH:
        return _strongest_per_cell(step, size)
    best, total, labels = torch.zeros(size), torch.zeros(size), torch.full(size, -1)
    for tokens, maps in step.map_chunks(size):
        value, token = maps.max(0)
        better = value > best
        best = torch.where(better, value, best)
        labels = torch.where(better, token + tokens.start, labels)
        total += maps.sum(0)
    equal = 1 / max(9 if isinstance(step.trace, AssociationTrace) else step.count, 2)
    dominance = ((best / total.clamp(min=1e-30) - equal) / (1 - equal)).clamp(0, 1)
    return labels.numpy(), dominance.numpy()


def _strongest_per_cell(step: Step, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The same for thousands of super tokens, a few pixels each: argmax in the feature map, then nearest neighbour."""
    trace = expect_trace(step.trace, AssociationTrace)
    indices, association = super_token_indices(trace), trace.association[0].float().unflatten(0, trace.size)
    association = torch.where(indices >= 0, association, 0.0)
    best, neighbour = association.max(2)
    labels = indices.gather(2, neighbour[..., None])[..., 0]
    maps = torch.stack([labels.float(), best / association.sum(2)])
    labels, fraction = resample_maps(maps, step.alignment, step.image_size, size, nearest=True).cpu().numpy()
    return labels.round().astype(int), np.clip((fraction - 1 / 9) / (1 - 1 / 9), 0, 1)


def paint_mosaic(
    image: np.ndarray, labels: np.ndarray, dominance: np.ndarray, colour_indices: np.ndarray | None = None
) -> np.ndarray:
    """Labels (H, W) as colours over the grey image, more opaque with dominance (H, W), with borders between them."""
    if colour_indices is not None:
        labels = np.where(labels >= 0, colour_indices[labels], -1)
    alpha = np.where(labels >= 0, MIN_ALPHA + (MAX_ALPHA - MIN_ALPHA) * dominance, 0.0)
    return draw_borders(blend(to_grey(image), token_colours(labels), alpha), labels)


def mosaic_figure(observation: Observation, model_name: str) -> Figure:
    """The mosaic of every stage, with consistent colours."""
    canvas = observation.view.canvas
    panels = [Panel(canvas, observation.view.name)]
    for step in observation.main:
        labels, dominance = strongest_tokens(step, canvas.shape[:2])
        used = len(np.unique(labels[labels >= 0]))
        note = f"{step.count} tokens, {used} strongest somewhere"
        panels.append(Panel(paint_mosaic(canvas, labels, dominance, step.colour_indices), step.title, note))
    return Figure(
        "mosaic",
        "The strongest token of each pixel",
        f"{model_name}. Every pixel has the colour of its strongest token, more opaque the larger that token's "
        "fraction of the pixel's weight; a token keeps its colour from stage to stage.",
        panels,
        columns=len(panels) if len(panels) <= 4 else 3,
    )
