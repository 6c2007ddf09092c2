"""The one view for all: each pixel in the colour of its strongest token, as strong as that token leads."""

import numpy as np
import torch

from saccade.explain.drawing.alignment import draw_maps
from saccade.explain.drawing.colours import token_colours
from saccade.explain.drawing.figure import Figure, Panel
from saccade.explain.drawing.overlay import blend, borders, to_grey
from saccade.explain.observe import Observation, Step, super_token_numbers
from saccade.tokens.trace import AssociationTrace

MANY = 256  # super tokens that are compared smoothly
FAINT, STRONG = 0.3, 0.8  # alpha where all tokens count the same, and where one has everything


def strongest(step: Step, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Number of the strongest token at every pixel (-1: none sees it) and its lead in [0, 1], both of `size`.

    The lead is the token's share of what all tokens give the pixel, 0 if they all give the same.
    """
    if isinstance(step.trace, AssociationTrace) and step.count > MANY:
        return _nearest(step, size)
    best, total, labels = torch.zeros(size), torch.zeros(size), torch.full(size, -1)
    for start in range(0, step.count, 64):  # bounded memory for hundreds of tokens
        maps = step.maps(size, range(start, min(start + 64, step.count))).cpu()
        value, token = maps.max(0)
        better = value > best
        best = torch.where(better, value, best)
        labels = torch.where(better, token + start, labels)
        total += maps.sum(0)
    even = 1 / max(9 if isinstance(step.trace, AssociationTrace) else step.count, 2)
    lead = ((best / total.clamp(min=1e-30) - even) / (1 - even)).clamp(0, 1)
    return labels.numpy(), lead.numpy()


def _nearest(step: Step, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The same for thousands of super tokens, each a few pixels large: by the nearest cell of the map."""
    numbers, shares = super_token_numbers(step.trace), step.trace.association[0].float().unflatten(0, step.trace.size)
    shares = torch.where(numbers >= 0, shares, 0.0)
    best, which = shares.max(2)
    labels = numbers.gather(2, which[..., None])[..., 0]
    maps = torch.stack([labels.float(), best / shares.sum(2)])
    labels, share = draw_maps(maps, step.place, step.image, size, nearest=True).cpu().numpy()
    return labels.round().astype(int), np.clip((share - 1 / 9) / (1 - 1 / 9), 0, 1)


def paint(picture: np.ndarray, labels: np.ndarray, lead: np.ndarray, numbers: np.ndarray | None = None) -> np.ndarray:
    """The mosaic: labels and lead (H, W) on the picture; `numbers` are the tokens' colour numbers."""
    if numbers is not None:
        labels = np.where(labels >= 0, numbers[labels], -1)
    alpha = np.where(labels >= 0, FAINT + (STRONG - FAINT) * lead, 0.0)
    return borders(blend(to_grey(picture), token_colours(labels), alpha), labels)


def mosaic(seen: Observation, model_name: str) -> Figure:
    """The mosaic of every stage, in the same colours."""
    panels = [Panel(seen.view.picture, seen.view.name)]
    for step in seen.main:
        labels, lead = strongest(step, seen.view.picture.shape[:2])
        used = len(np.unique(labels[labels >= 0]))
        note = f"{step.count} tokens, {used} lead somewhere"
        panels.append(Panel(paint(seen.view.picture, labels, lead, step.numbers), step.title, note))
    return Figure(
        "mosaic",
        "Which token owns which pixel",
        f"{model_name}. Every pixel has the colour of its strongest token, stronger where that token leads more "
        "clearly; a token keeps its colour from stage to stage.",
        panels,
        columns=len(panels) if len(panels) <= 4 else 3,
    )
