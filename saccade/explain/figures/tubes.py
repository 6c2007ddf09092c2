"""VideoSparseFormer: where and when tubes look, as strips of frames, a chart of time, and a moving picture."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from saccade.explain.clips import ClipView
from saccade.explain.drawing.colours import DARK_BRIGHT, colour_scale, token_colours
from saccade.explain.drawing.figure import Figure, Panel
from saccade.explain.drawing.overlay import boxes, dots, to_grey
from saccade.tokens.trace import TubeTrace

STRIP = 8  # frames of a strip at most
PAUSE = 150  # milliseconds of a frame of the moving picture


def presence(trace: TubeTrace) -> Tensor:
    """(M, T): the share of its points that each token reads from each frame, of the first clip."""
    frames = trace.size[0]
    at = trace.points[0, :, :, 2, None] * frames - 0.5  # frame i is centred at i
    return (1 - (at - torch.arange(frames, device=at.device)).abs()).clamp(min=0).mean(1)


def draw_frame(
    picture: np.ndarray, trace: TubeTrace, number: int, tokens: Sequence[int] | np.ndarray | None = None
) -> np.ndarray:
    """One frame with the tubes that pass through its moment and the points that are read from it, near or far."""
    frames = trace.size[0]
    chosen = torch.arange(trace.regions.shape[1]) if tokens is None else torch.as_tensor(np.array(tokens))
    tubes, points = trace.regions[0].cpu()[chosen], trace.points[0].cpu()[chosen]
    moment = (number + 0.5) / frames
    colours = token_colours(chosen.numpy())
    through = ((tubes[:, 2] <= moment) & (moment <= tubes[:, 5])).numpy()
    drawn = boxes(picture, tubes[:, [0, 1, 3, 4]].numpy()[through], colours[through])
    share = (1 - (points[..., 2] * frames - 0.5 - number).abs()).clamp(min=0)  # (M, P)
    radius = picture.shape[1] / 110
    for least, size in ((0.01, 0.5), (0.5, 1.0)):  # points that lie closer to the frame are larger
        near = (share >= least) & ((share < 0.5) if least < 0.5 else True)
        for token in torch.nonzero(near.any(1)).flatten().tolist():
            spots = points[token, near[token], :2].numpy()[None]
            drawn = dots(drawn, spots, colours[[token]], radius * size)
    return drawn


def strip_figure(view: ClipView, traces: Sequence[TubeTrace], model_name: str) -> Figure:
    """A row of frames for every look, with all tubes and points."""
    numbers = chosen_frames(len(view.pictures))
    panels = []
    for look, trace in enumerate(traces):
        lengths = trace.regions[0, :, 5] - trace.regions[0, :, 2]
        for number in numbers:
            drawn = draw_frame(to_grey(view.pictures[number]), trace, number)
            note = f"look {look + 1} of {len(traces)}" if number == numbers[0] else ""
            panels.append(Panel(drawn, f"frame {number + 1}", note))
        panels[-1] = panels[-1]._replace(note=f"tubes last {float(lengths.mean()):.0%} of the clip")
    return Figure(
        "tubes",
        "Where the tokens look, over time",
        f"{model_name}, {traces[0].regions.shape[1]} tokens, {len(view.pictures)} frames. A row for every look: tubes "
        "where they pass through a frame, and the points that are read from it, smaller the farther they lie in time.",
        panels,
        columns=len(numbers),
    )


def responding_strip(
    view: ClipView, trace: TubeTrace, responses: Tensor, answer: str, model_name: str, top: int = 5
) -> Figure:
    """The tokens that respond most to a class, in the last look. responses (M,) are their logits."""
    best = responses.argsort(descending=True, stable=True)[:top].cpu().numpy()
    numbers = chosen_frames(len(view.pictures))
    panels = [Panel(draw_frame(view.pictures[n], trace, n, best), f"frame {n + 1}") for n in numbers]
    tokens = ", ".join(f"{token} ({float(responses[token]):.2g})" for token in best)
    return Figure(
        "responding",
        f"The {len(best)} tokens that answer {answer}",
        f"{model_name}. The classifier on single tokens: highest logits of {len(responses)} tokens, {tokens}.",
        panels,
        columns=len(numbers),
    )


def when_figure(traces: Sequence[TubeTrace], model_name: str) -> Figure:
    """When every token looks: a row for each token, a column for each frame, as bright as its share of points."""
    panels = []
    for look, trace in enumerate(traces):
        shares = presence(trace).cpu().numpy()
        order = np.argsort((shares * np.arange(shares.shape[1])).sum(1) / shares.sum(1).clip(1e-9), kind="stable")
        cell = max(2, 320 // len(shares)), max(8, 320 // shares.shape[1])
        bright = colour_scale(shares[order] / max(shares.max(), 1e-9), DARK_BRIGHT)
        panels.append(Panel(bright.repeat(cell[0], 0).repeat(cell[1], 1), f"look {look + 1} of {len(traces)}"))
    return Figure(
        "when",
        "When the tokens look",
        f"{model_name}. Tokens from top to bottom, sorted by their moment; frames from left to right; bright where "
        "most of a token's points are read.",
        panels,
        columns=len(panels),
    )


def film_figure(
    view: ClipView, trace: TubeTrace, tokens: Sequence[int] | np.ndarray | None, title: str, model_name: str
) -> Figure:
    """The clip as a moving picture, with its tubes; the file beside it is animated, too."""
    film = np.stack([draw_frame(picture, trace, i, tokens) for i, picture in enumerate(view.pictures)])
    return Figure(
        "film",
        title,
        f"{model_name}, last look. Tubes appear and disappear with their moments.",
        [Panel(film[0], view.name, film=film)],
        columns=1,
    )


def chosen_frames(count: int) -> list[int]:
    """At most STRIP frame numbers, evenly spaced from the first to the last."""
    if count <= STRIP:
        return list(range(count))
    return [round(i * (count - 1) / (STRIP - 1)) for i in range(STRIP)]
