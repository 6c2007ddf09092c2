"""VideoSparseFormer: region tubes over frames, when each token samples, and an animation."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from saccade.explanation.clips import ClipView
from saccade.explanation.drawing.colours import DARK_BRIGHT, colour_scale, token_colours
from saccade.explanation.drawing.figure import Figure, Panel
from saccade.explanation.drawing.overlay import draw_boxes, draw_points, to_grey
from saccade.explanation.figures.sparseformer import response_figure, top_responses
from saccade.explanation.observe import step_title
from saccade.tokens.trace import TubeTrace

MAX_FRAMES = 8  # in one row of a figure


def frame_weights(points: Tensor, frames: int) -> Tensor:
    """Points (…, 3), x y t in [0, 1] -> (…, T): linear interpolation weight of each frame, as the model samples."""
    position = points[..., 2, None] * frames - 0.5  # frame i is centred at i
    return (1 - (position - torch.arange(frames, device=points.device)).abs()).clamp(min=0)


def frame_fractions(trace: TubeTrace) -> Tensor:
    """(M, T): fraction of its points that each token samples from each frame, of the first clip."""
    return frame_weights(trace.points[0], trace.size[0]).mean(1)


def draw_tubes(
    image: np.ndarray, trace: TubeTrace, frame: int, tokens: Sequence[int] | np.ndarray | None = None
) -> np.ndarray:
    """One frame with the tubes that contain its time and the points sampled from it, smaller for smaller weights."""
    frames = trace.size[0]
    indices = torch.arange(trace.regions.shape[1]) if tokens is None else torch.as_tensor(np.array(tokens))
    tubes, points = trace.regions[0].cpu()[indices], trace.points[0].cpu()[indices]
    time = (frame + 0.5) / frames
    colours = token_colours(indices.numpy())
    active = ((tubes[:, 2] <= time) & (time <= tubes[:, 5])).numpy()
    drawn = draw_boxes(image, tubes[:, [0, 1, 3, 4]].numpy()[active], colours[active])
    weights = frame_weights(points, frames)[..., frame]  # (M, P)
    radius = image.shape[1] / 110
    for low, high, scale in ((0.01, 0.5, 0.5), (0.5, float("inf"), 1.0)):
        chosen = (weights >= low) & (weights < high)
        for token in torch.nonzero(chosen.any(1)).flatten().tolist():
            positions = points[token, chosen[token], :2].numpy()[None]
            drawn = draw_points(drawn, positions, colours[[token]], radius * scale)
    return drawn


def tube_figure(view: ClipView, traces: Sequence[TubeTrace], model_name: str) -> Figure:
    """A row of frames per step, with all tubes and points."""
    shown = evenly_spaced_frames(len(view.frames))
    panels = []
    for trace in traces:
        lengths = trace.regions[0, :, 5] - trace.regions[0, :, 2]
        for frame in shown:
            drawn = draw_tubes(to_grey(view.frames[frame]), trace, frame)
            note = step_title(trace, traces) if frame == shown[0] else ""
            panels.append(Panel(drawn, f"frame {frame + 1}", note))
        panels[-1] = panels[-1]._replace(note=f"mean tube length {float(lengths.mean()):.0%} of the clip")
    return Figure(
        "tubes",
        "Region tubes and sampling points over time",
        f"{model_name}, {traces[0].regions.shape[1]} tokens, {len(view.frames)} frames. One row per step: tubes in the "
        "frames they contain, and the points sampled from each frame, smaller if they lie between frames.",
        panels,
        columns=len(shown),
    )


def clip_response_figure(
    view: ClipView, trace: TubeTrace, responses: Tensor, class_name: str, model_name: str, top: int = 5
) -> Figure:
    """Tubes of the tokens that respond most to a class, in the last step. responses (M,) are logits."""
    best = top_responses(responses, top)
    shown = evenly_spaced_frames(len(view.frames))
    panels = [Panel(draw_tubes(view.frames[n], trace, n, best), f"frame {n + 1}") for n in shown]
    return response_figure(panels, best, responses, class_name, model_name)


def timing_figure(traces: Sequence[TubeTrace], model_name: str) -> Figure:
    """Token x frame matrix per step: brightness is the fraction of the token's points in the frame."""
    panels = []
    for trace in traces:
        fractions = frame_fractions(trace).cpu().numpy()
        mean_frame = (fractions * np.arange(fractions.shape[1])).sum(1) / fractions.sum(1).clip(1e-9)
        order = np.argsort(mean_frame, kind="stable")
        cell = max(2, 320 // len(fractions)), max(8, 320 // fractions.shape[1])
        colours = colour_scale(fractions[order] / max(fractions.max(), 1e-9), DARK_BRIGHT)
        panels.append(Panel(colours.repeat(cell[0], 0).repeat(cell[1], 1), step_title(trace, traces)))
    return Figure(
        "timing",
        "Frames that each token samples",
        f"{model_name}. Rows: tokens, sorted by their mean frame; columns: frames; bright where most of a token's "
        "points are sampled.",
        panels,
        columns=len(panels),
    )


def animation_figure(
    view: ClipView, trace: TubeTrace, tokens: Sequence[int] | np.ndarray | None, title: str, model_name: str
) -> Figure:
    """The clip with its tubes as an animation."""
    frames = np.stack([draw_tubes(image, trace, i, tokens) for i, image in enumerate(view.frames)])
    return Figure(
        "animation",
        title,
        f"{model_name}, last step. Tubes are drawn in the frames they contain.",
        [Panel(frames[0], view.name, frames=frames)],
        columns=1,
    )


def evenly_spaced_frames(count: int) -> list[int]:
    """At most MAX_FRAMES frame indices, evenly spaced from the first to the last."""
    if count <= MAX_FRAMES:
        return list(range(count))
    return [round(i * (count - 1) / (MAX_FRAMES - 1)) for i in range(MAX_FRAMES)]
