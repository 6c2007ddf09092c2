"""Which tokens attend to which: a matrix, and the strongest links drawn on the picture."""

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from saccade.explain.drawing.colours import DARK_BRIGHT, colour_scale, token_colours
from saccade.explain.drawing.figure import Figure, Panel
from saccade.explain.drawing.overlay import scale_to_one, to_grey
from saccade.explain.observe import Observation, Step
from saccade.tokens.trace import AssignmentTrace


def relations(step: Step) -> Tensor | None:
    """(M, M): how much token i takes from token j, mean over heads, rows sum to 1; None if nobody attends to them.

    Where pixels attend to tokens and not tokens to tokens (PaCa), token i stands for its pixels: the attention of
    each pixel counts by its assignment to i.
    """
    if step.attention is None:
        return None
    weights = step.attention.weights[0].mean(0)  # (Q, M)
    if weights.shape[0] == step.count:
        return weights
    if isinstance(step.trace, AssignmentTrace) and weights.shape[0] == step.trace.assignment.shape[2]:
        return step.trace.assignment[0].float() @ weights
    return None


def centres(step: Step, size: tuple[int, int] = (64, 64)) -> np.ndarray:
    """Where each token's map is strongest, (M, 2), x y in units of the image: the centre of mass of its peaks."""
    x, y = (torch.arange(size[1]) + 0.5) / size[1], (torch.arange(size[0]) + 0.5) / size[0]
    found = []
    for start in range(0, step.count, 64):  # bounded memory for thousands of tokens
        maps = step.maps(size, range(start, min(start + 64, step.count))).double().cpu().clamp(min=0)
        mass = (maps / maps.amax((1, 2), keepdim=True).clamp(min=1e-30)) ** 4
        total = mass.sum((1, 2)).clamp(min=1e-30)
        found.append(torch.stack([(mass.sum(1) * x).sum(1) / total, (mass.sum(2) * y).sum(1) / total], 1))
    return torch.cat(found).numpy()


def draw_links(
    picture: np.ndarray, at: np.ndarray, links: np.ndarray, colours: np.ndarray, most: int = 48
) -> np.ndarray:
    """Tokens as discs at their places (M, 2), the `most` strongest links (M, M) between different tokens as lines."""
    canvas = Image.fromarray(to_grey(picture))
    lines = ImageDraw.Draw(canvas, "RGBA")
    points = at * [picture.shape[1], picture.shape[0]]
    between = np.where(np.eye(len(at), dtype=bool), 0, links)
    strong = np.argsort(-between, axis=None, kind="stable")[: min(most, len(at) * 2)]
    top = between.max() or 1.0
    for flat in strong[::-1]:  # the strongest last, on top
        i, j = np.unravel_index(flat, between.shape)
        share = float(between[i, j] / top)
        ends = [tuple(points[i]), tuple(points[j])]
        lines.line(ends, fill=(0, 0, 0, round(150 * share)), width=round(2 + 4 * share))
        lines.line(ends, fill=(*(int(c) for c in colours[i]), round(60 + 195 * share)), width=max(1, round(3 * share)))
    radius = max(3.0, picture.shape[1] / 110)
    for (x, y), colour in zip(points, colours, strict=True):
        box = [x - radius, y - radius, x + radius, y + radius]
        lines.ellipse(box, fill=tuple(int(c) for c in colour), outline=(255, 255, 255), width=1)
    return np.array(canvas)


def draw_matrix(links: np.ndarray, side: int) -> np.ndarray:
    """The matrix as a picture of about `side` pixels; one that is larger is averaged in blocks."""
    if len(links) > side:
        links = torch.nn.functional.adaptive_avg_pool2d(torch.from_numpy(links)[None], side)[0].numpy()
    cells = side // len(links)
    return np.kron(colour_scale(scale_to_one(links), DARK_BRIGHT), np.ones((cells, cells, 1), dtype=np.uint8))


def relation_figure(seen: Observation, model_name: str, most: int = 2) -> Figure | None:
    """Links on the picture and the whole matrix, for the last steps whose tokens are attended to."""
    related = [(step, links) for step in seen.main for links in [relations(step)] if links is not None][-most:]
    if not related:
        return None
    panels = []
    for step, found in related:
        links = found.cpu().numpy()
        drawn = draw_links(seen.view.picture, centres(step), links, token_colours(step.numbers))
        panels.append(Panel(drawn, step.title, "strongest links"))
        matrix = draw_matrix(links, seen.view.picture.shape[0])
        note = f"row: who attends, column: to whom; brightest {links.max():.2f}, even {1 / len(links):.2f}"
        panels.append(Panel(matrix, f"all {len(links)} x {len(links)}", note, sharp=True))
    steps = ", ".join(f"{step.title} ({step.count} tokens)" for step, _ in related)
    return Figure(
        "relations",
        "Which tokens attend to which",
        f"{model_name}, {steps}. Left: each token where its map is strongest, with the strongest links in the colour "
        "of the one that attends. Right: all of them, mean over heads.",
        panels,
        columns=4 if len(panels) > 2 else 3,
    )
