"""Hand-made traces with known figures."""

import numpy as np
import torch
from torch import Tensor

from saccade.explanation.drawing.alignment import Alignment
from saccade.explanation.hooks.attention import Attention
from saccade.explanation.images import View
from saccade.explanation.observe import Observation, Step, step_title
from saccade.tokens.trace import AssignmentTrace, AssociationTrace, RegionTrace, Trace, TubeTrace, num_tokens


def view(height: int, width: int, value: int | None = None, seed: int = 0) -> View:
    """A constant or random image, with a canvas of the same size."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    if value is not None:
        pixels[:] = value
    return View("planted", torch.from_numpy(pixels).permute(2, 0, 1).float() / 255, pixels)


def step(
    trace: Trace,
    image_size: tuple[int, int],
    alignment: Alignment | None = None,
    attention: Attention | None = None,
) -> Step:
    """A step with colour indices 0, 1, 2, …, its map stretched over the image unless an alignment is given."""
    assert not isinstance(trace, TubeTrace)
    alignment = alignment or Alignment.stretched(trace.size, image_size)
    colours = np.arange(num_tokens(trace))
    return Step(trace, 0, step_title(trace, [trace]), alignment, colours, attention, image_size)


def observation(view: View, *steps: Step) -> Observation:
    return Observation(view, None, list(steps))


def quadrants(side: int = 4) -> AssignmentTrace:
    """Four tokens, each uniform over one quadrant of a side x side map: 0 top left, 1 top right, 2, 3 below."""
    maps = torch.zeros(1, 4, side, side)
    half = side // 2
    for token in range(4):
        rows, columns = slice(half * (token // 2), None), slice(half * (token % 2), None)
        maps[0, token, rows, columns][:half, :half] = 1 / half**2
    return AssignmentTrace(maps.flatten(2), (side, side), name="blocks.0")


def association(labels: Tensor, cell: int) -> AssociationTrace:
    """Every pixel fully associated with the super token of labels (H, W), which must be one of its nine neighbours."""
    height, width = labels.shape
    rows, columns = -(-height // cell), -(-width // cell)
    own = (torch.arange(height) // cell)[:, None], (torch.arange(width) // cell)[None]
    down, right = labels // columns - own[0], labels % columns - own[1]
    weights = torch.nn.functional.one_hot(((down + 1) * 3 + right + 1).long(), 9).float()
    tokens = torch.zeros(1, rows * columns, 2)
    return AssociationTrace(
        weights.reshape(1, -1, 9), (height, width), (rows, columns), cell, tokens, "stages.0.blocks.0"
    )


def region_trace(centres: list[tuple[float, float]], spread: float = 0.0, size=(16, 16)) -> RegionTrace:
    """Tokens with four points each, `spread` around a centre."""
    middle = torch.tensor(centres)
    corners = torch.tensor([[-1.0, -1], [1, -1], [-1, 1], [1, 1]]) * spread
    points = middle[:, None] + corners
    regions = torch.cat([middle - 0.1, middle + 0.1], 1)
    return RegionTrace(regions[None], points[None], size, torch.zeros(1, len(centres), 2), "focus.blocks.0")
