"""SViT, Figures 2 and 4: super tokens as borders, from the grid to the association, and what one pixel attends to."""

import numpy as np
import torch
from torch import Tensor

from saccade.explain.drawing.alignment import axis, draw_maps
from saccade.explain.drawing.figure import Figure, Panel
from saccade.explain.drawing.overlay import borders, boxes, scale_to_one, tint
from saccade.explain.figures.mosaic import strongest
from saccade.explain.observe import Observation, Step, super_token_numbers
from saccade.tokens.trace import AssociationTrace

RED, GREEN = (213, 47, 39), (0, 158, 115)


def cell_labels(step: Step, size: tuple[int, int]) -> np.ndarray:
    """The grid that super tokens start from: the number of its cell for every drawn pixel."""
    trace = step.trace
    rows = axis(trace.size[0], step.place.stride[0], step.place.offset[0], step.image[0], size[0], nearest=True)
    columns = axis(trace.size[1], step.place.stride[1], step.place.offset[1], step.image[1], size[1], nearest=True)
    row = rows.argmax(1).numpy() // trace.cell
    column = columns.argmax(1).numpy() // trace.cell
    return row[:, None] * trace.grid[1] + column[None, :]


def super_token_figure(seen: Observation, steps: list[Step], anchor: tuple[float, float], model_name: str) -> Figure:
    """Figure 4 (SVIT-55): borders of the cells, then of the super tokens of each stage.

    In the grid, the green cell's pixels may belong to the tokens of the red square.
    """
    picture, size = seen.view.picture, seen.view.picture.shape[:2]
    grid = cell_labels(steps[0], size)
    drawn = borders(picture, grid)
    y, x = min(int(anchor[1] * size[0]), size[0] - 1), min(int(anchor[0] * size[1]), size[1] - 1)
    columns = steps[0].trace.grid[1]
    row, column = divmod(int(grid[y, x]), columns)
    far = (np.abs(grid // columns - row) <= 1) & (np.abs(grid % columns - column) <= 1)
    regions = np.array([_bounds(far), _bounds(grid == grid[y, x])])
    drawn = boxes(drawn, regions, np.array([RED, GREEN]), width=3)
    panels = [Panel(drawn, "initial grid", f"{steps[0].count} cells")]
    for step in steps:
        labels, _ = strongest(step, size)
        panels.append(Panel(borders(picture, labels), step.title, f"{step.count} super tokens"))
    return Figure(
        "super_tokens",
        "Super tokens, from the initial grid to the association",
        f"{model_name}. Lines run where the strongest super token changes. In the grid, pixels of the green cell can "
        "only belong to the nine super tokens of the red square.",
        panels,
        columns=len(panels) if len(panels) <= 4 else 3,
    )


def effective_attention(step: Step, anchor: tuple[float, float]) -> Tensor:
    """(heads, H, W): how much the pixel at `anchor` takes from every other, through association, attention and back.

    The row of Q A Q̂ᵀ at the anchor: its shares in nine tokens, their attention to all tokens, and each token's shares
    of its pixels (the association, divided by its sum over pixels).
    """
    trace = step.trace
    if not isinstance(trace, AssociationTrace) or step.attention is None:
        raise ValueError(f"{step.title} has no attention among super tokens.")
    numbers = super_token_numbers(trace)  # (H, W, 9)
    shares = trace.association[0].float().unflatten(0, trace.size) * (numbers >= 0)
    numbers = numbers.clamp(min=0)
    total = shares.new_zeros(step.count).scatter_add_(0, numbers.flatten(), shares.flatten())  # of each token's shares
    row, column = anchor_cell(step, anchor)
    weights = step.attention.weights[0].float()  # (heads, M, M)
    taken = torch.einsum("k,hkm->hm", shares[row, column], weights[:, numbers[row, column]])  # from every token
    return ((taken / total.clamp(min=1e-12))[:, numbers] * shares).sum(3)


def anchor_cell(step: Step, anchor: tuple[float, float]) -> tuple[int, int]:
    """Row and column, in the step's map, of a place x, y in units of the image."""
    x, y = anchor[0] * step.image[1] - 0.5, anchor[1] * step.image[0] - 0.5
    row = round((y - step.place.offset[0]) / step.place.stride[0])
    column = round((x - step.place.offset[1]) / step.place.stride[1])
    return min(max(row, 0), step.trace.size[0] - 1), min(max(column, 0), step.trace.size[1] - 1)


def anchor_figure(seen: Observation, steps: list[Step], anchor: tuple[float, float], model_name: str) -> Figure | None:
    """Figure 2d (SVIT-56): what the anchor attends to, per head, as a share of its maximum."""
    picture, panels = seen.view.picture, []
    for step in steps:
        if step.attention is None:
            continue
        rows = effective_attention(step, anchor)
        heads = [("", rows.mean(0))]
        if len(rows) > 1:
            heads = [(f", head {i + 1}", row) for i, row in enumerate(rows[:3])]
        for name, row in heads:
            drawn = draw_maps(row[None], step.place, step.image, picture.shape[:2])[0].cpu().numpy()
            painted = tint(picture, scale_to_one(drawn, from_zero=True), RED)
            box = np.array([[anchor[0] - 0.02, anchor[1] - 0.02, anchor[0] + 0.02, anchor[1] + 0.02]])
            marked = boxes(painted, box, np.array([GREEN]), 3, rim=True)
            reach = float((row > row.max() / 2).float().mean())
            panels.append(Panel(marked, step.title + name, f"{reach:.0%} of the image above half the maximum"))
    if not panels:
        return None
    return Figure(
        "anchor",
        "What one place attends to",
        f"{model_name}, {steps[0].count} super tokens. From the green square through its super tokens, their "
        "attention and back to the pixels; full red is the strongest place of each map.",
        panels,
        columns=len(panels) if len(panels) <= 5 else 4,
    )


def _bounds(mask: np.ndarray) -> list[float]:
    rows, columns = np.where(mask.any(1))[0], np.where(mask.any(0))[0]
    height, width = mask.shape
    return [columns[0] / width, rows[0] / height, (columns[-1] + 1) / width, (rows[-1] + 1) / height]
