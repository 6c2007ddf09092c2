"""Traces made by hand, whose right picture is known."""

import numpy as np
import torch
from torch import Tensor

from saccade.explain.drawing.alignment import Place
from saccade.explain.images import View
from saccade.explain.observe import Observation, Step, title_of
from saccade.tokens.trace import AssignmentTrace, AssociationTrace, RegionTrace, Trace


def view(height: int, width: int, value: int | None = None, seed: int = 0) -> View:
    """A flat or a random picture, drawn at the size the model sees it."""
    random = np.random.default_rng(seed)
    picture = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
    if value is not None:
        picture[:] = value
    return View("planted", torch.from_numpy(picture).permute(2, 0, 1).float() / 255, picture)


def step(trace: Trace, image: tuple[int, int], place: Place | None = None, attention=None) -> Step:
    count = next(
        v for v in (getattr(trace, "assignment", None), getattr(trace, "regions", None), trace.tokens) if v is not None
    )
    numbers = np.arange(count.shape[1])
    return Step(
        trace, 0, title_of(trace, [trace]), place or Place.stretched(trace.size, image), numbers, attention, image
    )


def seen(view: View, *steps: Step) -> Observation:
    return Observation(view, None, list(steps))


def quadrants(side: int = 4) -> AssignmentTrace:
    """Four tokens, each even over one quarter of a side x side map: 0 top left, 1 top right, 2, 3 below."""
    maps = torch.zeros(1, 4, side, side)
    half = side // 2
    for token in range(4):
        rows, columns = slice(half * (token // 2), None), slice(half * (token % 2), None)
        maps[0, token, rows, columns][:half, :half] = 1 / half**2
    return AssignmentTrace(maps.flatten(2), (side, side), name="blocks.0")


def association(labels: Tensor, cell: int) -> AssociationTrace:
    """Every pixel wholly with the super token that labels (H, W) names; it must be one of the nine around it."""
    height, width = labels.shape
    rows, columns = -(-height // cell), -(-width // cell)
    own = (torch.arange(height) // cell)[:, None], (torch.arange(width) // cell)[None]
    down, right = labels // columns - own[0], labels % columns - own[1]
    share = torch.nn.functional.one_hot(((down + 1) * 3 + right + 1).long(), 9).float()
    tokens = torch.zeros(1, rows * columns, 2)
    return AssociationTrace(
        share.reshape(1, -1, 9), (height, width), (rows, columns), cell, tokens, "stages.0.blocks.0"
    )


def looking_at(centres: list[tuple[float, float]], spread: float = 0.0, size=(16, 16)) -> RegionTrace:
    """Tokens whose four points lie `spread` around a centre each."""
    middle = torch.tensor(centres)
    corners = torch.tensor([[-1.0, -1], [1, -1], [-1, 1], [1, 1]]) * spread
    points = middle[:, None] + corners
    regions = torch.cat([middle - 0.1, middle + 0.1], 1)
    return RegionTrace(regions[None], points[None], size, torch.zeros(1, len(centres), 2), "focus.blocks.0")
