"""Relations, for every family: which tokens attend to which, as a matrix and as links on the image."""

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from saccade.explanation.drawing.colours import DARK_BRIGHT, colour_scale, token_colours
from saccade.explanation.drawing.figure import Figure, Panel
from saccade.explanation.drawing.overlay import rescale, to_grey
from saccade.explanation.observe import Observation, Step
from saccade.tokens.trace import AssignmentTrace


def token_relations(step: Step) -> Tensor | None:
    """(M, M): attention of token i to token j, mean over heads, rows sum to 1; None if the step has no attention.

    Where pixels attend to tokens (PaCa Eq. 1), row i is the attention of all pixels, averaged by their assignment to
    token i.
    """
    if step.attention is None:
        return None
    weights = step.attention.weights[0].mean(0)  # (Q, M)
    if weights.shape[0] == step.count:
        return weights
    if isinstance(step.trace, AssignmentTrace) and weights.shape[0] == step.trace.assignment.shape[2]:
        return step.trace.assignment[0].float() @ weights
    return None


def token_centres(step: Step, size: tuple[int, int] = (64, 64)) -> np.ndarray:
    """(M, 2), x y in [0, 1]: centre of mass of each token's map to the fourth power, which favours its peak."""
    x, y = (torch.arange(size[1]) + 0.5) / size[1], (torch.arange(size[0]) + 0.5) / size[0]
    centres = []
    for _, maps in step.map_chunks(size):
        maps = maps.double().clamp(min=0)
        mass = (maps / maps.amax((1, 2), keepdim=True).clamp(min=1e-30)) ** 4
        total = mass.sum((1, 2)).clamp(min=1e-30)
        centres.append(torch.stack([(mass.sum(1) * x).sum(1) / total, (mass.sum(2) * y).sum(1) / total], 1))
    return torch.cat(centres).numpy()


def draw_links(
    image: np.ndarray, centres: np.ndarray, links: np.ndarray, colours: np.ndarray, max_links: int = 48
) -> np.ndarray:
    """Tokens as discs at their centres (M, 2), and the strongest links (M, M) between different tokens as lines."""
    canvas = Image.fromarray(to_grey(image))
    draw = ImageDraw.Draw(canvas, "RGBA")
    points = centres * [image.shape[1], image.shape[0]]
    between = np.where(np.eye(len(centres), dtype=bool), 0, links)
    strongest = np.argsort(-between, axis=None, kind="stable")[: min(max_links, len(centres) * 2)]
    highest = between.max() or 1.0
    for flat in strongest[::-1]:  # the strongest last, on top
        i, j = np.unravel_index(flat, between.shape)
        strength = float(between[i, j] / highest)
        ends = [tuple(points[i]), tuple(points[j])]
        colour = *(int(c) for c in colours[i]), round(60 + 195 * strength)
        draw.line(ends, fill=(0, 0, 0, round(150 * strength)), width=round(2 + 4 * strength))
        draw.line(ends, fill=colour, width=max(1, round(3 * strength)))
    radius = max(3.0, image.shape[1] / 110)
    for (x, y), colour in zip(points, colours, strict=True):
        box = [x - radius, y - radius, x + radius, y + radius]
        draw.ellipse(box, fill=tuple(int(c) for c in colour), outline=(255, 255, 255), width=1)
    return np.array(canvas)


def draw_matrix(links: np.ndarray, side: int) -> np.ndarray:
    """The matrix as an image of about `side` pixels; a larger matrix is average-pooled."""
    if len(links) > side:
        links = torch.nn.functional.adaptive_avg_pool2d(torch.from_numpy(links)[None], side)[0].numpy()
    cells = side // len(links)
    return np.kron(colour_scale(rescale(links), DARK_BRIGHT), np.ones((cells, cells, 1), dtype=np.uint8))


def relation_figure(observation: Observation, model_name: str, max_steps: int = 2) -> Figure | None:
    """Links on the image and the full matrix, for the last steps with attention among tokens."""
    canvas = observation.view.canvas
    related = [(step, links) for step in observation.main if (links := token_relations(step)) is not None][-max_steps:]
    if not related:
        return None
    panels = []
    for step, relations in related:
        links = relations.cpu().numpy()
        drawn = draw_links(canvas, token_centres(step), links, token_colours(step.colour_indices))
        panels.append(Panel(drawn, step.title, "strongest links"))
        note = f"rows: queries, columns: keys; maximum {links.max():.2f}, uniform {1 / len(links):.2f}"
        matrix = draw_matrix(links, canvas.shape[0])
        panels.append(Panel(matrix, f"all {len(links)} x {len(links)}", note, sharp=True))
    steps = ", ".join(f"{step.title} ({step.count} tokens)" for step, _ in related)
    return Figure(
        "relations",
        "Which tokens attend to which",
        f"{model_name}, {steps}. Left: each token at the peak of its map, with the strongest links in the colour of "
        "the attending token. Right: all attention weights, mean over heads.",
        panels,
        columns=4 if len(panels) > 2 else 3,
    )
