"""Explanation of one clip: predictions, figures and arrays."""

from collections.abc import Sequence

import numpy as np
import torch

from saccade.explanation.clips import ClipView
from saccade.explanation.figures.gallery import rank_tokens
from saccade.explanation.figures.sparseformer import token_responses
from saccade.explanation.figures.tubes import (
    animation_figure,
    clip_response_figure,
    frame_fractions,
    timing_figure,
    tube_figure,
)
from saccade.explanation.hooks.record import record
from saccade.explanation.image_explanation import ImageExplanation, resolve_target, to_numpy
from saccade.explanation.observe import array_key, eval_mode, step_summary, step_title
from saccade.explanation.scores.importance import gradient_importance, occlusion_importance
from saccade.explanation.subject import Subject
from saccade.tokens.trace import TubeTrace, expect_trace, num_tokens

MAX_OCCLUSION = 64  # tokens for which occlusion is computed in addition to the gradient


def explain_clip(
    subject: Subject,
    view: ClipView,
    target: int | str | None = None,
    importance: Sequence[str] = ("gradient",),
    max_tokens: int | None = 12,
) -> ImageExplanation:
    """Figures and arrays of one clip; the animation shows the `max_tokens` most important tokens, None for all.

    Occlusion takes one forward pass per token: beyond MAX_OCCLUSION tokens it is computed only if it is the only kind.
    """
    model, clips = subject.model, subject.prepare(view.clip[None])
    with eval_mode(model), torch.no_grad(), record(model) as recorded:
        output = model(clips)
    traces = [expect_trace(trace, TubeTrace) for trace in recorded]
    resolved = resolve_target(subject, output, target)
    arrays = {"clip": view.clip.permute(1, 2, 3, 0).numpy()}
    values: dict[str, np.ndarray] = {}
    figures = [tube_figure(view, traces, subject.name), timing_figure(traces, subject.name)]
    last = traces[-1]
    if resolved.index is not None and resolved.score is not None:
        with eval_mode(model):
            responses = token_responses(model, clips)[0, :, resolved.index]
            arrays["responses"] = to_numpy(responses)
            figures.append(clip_response_figure(view, last, responses, resolved.name, subject.name))
            counts = [num_tokens(trace) for trace in traces]
            if "gradient" in importance:
                values["gradient"] = to_numpy(gradient_importance(model, clips, resolved.score, counts)[-1][0])
            if "occlusion" in importance and ("gradient" not in importance or counts[-1] <= MAX_OCCLUSION):
                drops = occlusion_importance(model, clips, resolved.score, len(traces) - 1, counts[-1])
                values["occlusion"] = to_numpy(drops)
    tokens = rank_tokens(values, num_tokens(last))[:max_tokens] if values and max_tokens else None
    title = "All tubes" if tokens is None else f"The {len(tokens)} most important tokens for {resolved.name}"
    figures.append(animation_figure(view, last, tokens, title, subject.name))
    for trace in traces:
        key = array_key(trace)
        arrays |= {f"regions/{key}": to_numpy(trace.regions[0]), f"points/{key}": to_numpy(trace.points[0])}
        arrays[f"frame_fractions/{key}"] = to_numpy(frame_fractions(trace))
    arrays |= {f"importance/{kind}/{last.name}": value for kind, value in values.items()}
    steps = [step_summary(trace, step_title(trace, traces)) for trace in traces]
    by_name = {figure.name: figure for figure in figures}
    return ImageExplanation(
        view.name, resolved.predictions, resolved.target, by_name, arrays, steps, list(resolved.notes)
    )
