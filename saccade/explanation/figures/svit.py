"""SViT Figs. 2 and 4: borders of super tokens, and the pixels one position attends to."""

import numpy as np
import torch
from torch import Tensor

from saccade.explanation.drawing.alignment import axis_weights, resample_maps
from saccade.explanation.drawing.figure import Figure, Panel
from saccade.explanation.drawing.overlay import draw_borders, draw_boxes, rescale, tint
from saccade.explanation.figures.mosaic import strongest_tokens
from saccade.explanation.observe import Observation, Step, super_token_indices
from saccade.tokens.trace import AssociationTrace, expect_trace

RED, GREEN = (213, 47, 39), (0, 158, 115)


def cell_labels(step: Step, size: tuple[int, int]) -> np.ndarray:
    """Index of the initial grid cell at every pixel of `size`."""
    trace, alignment = expect_trace(step.trace, AssociationTrace), step.alignment
    row, column = (
        axis_weights(
            trace.size[axis],
            alignment.stride[axis],
            alignment.offset[axis],
            step.image_size[axis],
            size[axis],
            nearest=True,
        )
        .argmax(1)
        .numpy()
        // trace.cell
        for axis in (0, 1)
    )
    return row[:, None] * trace.grid[1] + column[None, :]


def super_token_figure(
    observation: Observation, steps: list[Step], anchor: tuple[float, float], model_name: str
) -> Figure:
    """SViT Fig. 4: borders of the initial cells, then of the super tokens of each stage.

    The grid panel marks the anchor's cell in green and the 3x3 cells its pixels may be associated with in red.
    """
    canvas, size = observation.view.canvas, observation.view.canvas.shape[:2]
    grid = cell_labels(steps[0], size)
    drawn = draw_borders(canvas, grid)
    y, x = min(int(anchor[1] * size[0]), size[0] - 1), min(int(anchor[0] * size[1]), size[1] - 1)
    columns = expect_trace(steps[0].trace, AssociationTrace).grid[1]
    row, column = divmod(int(grid[y, x]), columns)
    neighbours = (np.abs(grid // columns - row) <= 1) & (np.abs(grid % columns - column) <= 1)
    regions = np.array([_bounds(neighbours), _bounds(grid == grid[y, x])])
    drawn = draw_boxes(drawn, regions, np.array([RED, GREEN]), width=3)
    panels = [Panel(drawn, "initial grid", f"{steps[0].count} cells")]
    for step in steps:
        labels, _ = strongest_tokens(step, size)
        panels.append(Panel(draw_borders(canvas, labels), step.title, f"{step.count} super tokens"))
    return Figure(
        "super_tokens",
        "Super tokens, from the initial grid to the association",
        f"{model_name}. Lines separate pixels with different strongest super tokens. In the grid, pixels of the green "
        "cell can only be associated with the nine super tokens inside the red square.",
        panels,
        columns=len(panels) if len(panels) <= 4 else 3,
    )


def effective_attention(step: Step, anchor: tuple[float, float]) -> Tensor:
    """(heads, H, W): weight of every pixel in the output at `anchor`, through association, attention and upsampling.

    The row of Q A Q̂ᵀ at the anchor (SViT Eqs. 14-15): its association with nine tokens, their attention to all
    tokens, and each token's association with its pixels, divided by its sum over pixels.
    """
    trace = step.trace
    if not isinstance(trace, AssociationTrace) or step.attention is None:
        raise ValueError(f"expected a step with attention among super tokens, got {step.title}.")
    indices = super_token_indices(trace)  # (H, W, 9)
    association = trace.association[0].float().unflatten(0, trace.size) * (indices >= 0)
    indices = indices.clamp(min=0)
    total = association.new_zeros(step.count).scatter_add_(0, indices.flatten(), association.flatten())  # (M,)
    row, column = anchor_cell(step, anchor)
    weights = step.attention.weights[0].float()  # (heads, M, M)
    per_token = torch.einsum("k,hkm->hm", association[row, column], weights[:, indices[row, column]])  # (heads, M)
    return ((per_token / total.clamp(min=1e-12))[:, indices] * association).sum(3)


def anchor_cell(step: Step, anchor: tuple[float, float]) -> tuple[int, int]:
    """Row and column, in the step's map, of a position x, y in [0, 1]."""
    height, width = expect_trace(step.trace, AssociationTrace).size
    x, y = anchor[0] * step.image_size[1] - 0.5, anchor[1] * step.image_size[0] - 0.5
    row = round((y - step.alignment.offset[0]) / step.alignment.stride[0])
    column = round((x - step.alignment.offset[1]) / step.alignment.stride[1])
    return min(max(row, 0), height - 1), min(max(column, 0), width - 1)


def anchor_figure(
    observation: Observation, steps: list[Step], anchor: tuple[float, float], model_name: str
) -> Figure | None:
    """SViT Fig. 2d: effective attention of the anchor per head, relative to its maximum; None without attention."""
    canvas, panels = observation.view.canvas, []
    for step in steps:
        if step.attention is None:
            continue
        attention = effective_attention(step, anchor)
        heads = [("", attention.mean(0))]
        if len(attention) > 1:
            heads = [(f", head {i + 1}", head) for i, head in enumerate(attention[:3])]
        for name, head in heads:
            values = resample_maps(head[None], step.alignment, step.image_size, canvas.shape[:2])[0].cpu().numpy()
            drawn = draw_anchor(canvas, values, anchor)
            above = float((head > head.max() / 2).float().mean())
            panels.append(Panel(drawn, step.title + name, f"{above:.0%} of the image above half the maximum"))
    if not panels:
        return None
    return Figure(
        "anchor",
        "What one position attends to",
        f"{model_name}, {steps[0].count} super tokens. Attention of the pixel in the green square to all pixels, "
        "through the association, the attention among super tokens and the upsampling; full red is each map's maximum.",
        panels,
        columns=len(panels) if len(panels) <= 5 else 4,
    )


def draw_anchor(image: np.ndarray, values: np.ndarray, anchor: tuple[float, float]) -> np.ndarray:
    """Values (H, W) in red, full at their maximum, and the anchor in a green square."""
    box = np.array([[anchor[0] - 0.02, anchor[1] - 0.02, anchor[0] + 0.02, anchor[1] + 0.02]])
    return draw_boxes(tint(image, rescale(values, from_zero=True), RED), box, np.array([GREEN]), 3, outline=True)


def _bounds(mask: np.ndarray) -> list[float]:
    """x0 y0 x1 y1 in [0, 1] of the true pixels."""
    rows, columns = np.where(mask.any(1))[0], np.where(mask.any(0))[0]
    height, width = mask.shape
    return [columns[0] / width, rows[0] / height, (columns[-1] + 1) / width, (rows[-1] + 1) / height]
