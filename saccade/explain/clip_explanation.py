"""One clip, explained: what was answered, where and when the tokens looked."""

from collections.abc import Sequence

import numpy as np
import torch

from saccade.explain.clips import ClipView
from saccade.explain.figures.gallery import order
from saccade.explain.figures.sparseformer import token_responses
from saccade.explain.figures.tubes import film_figure, presence, responding_strip, strip_figure, when_figure
from saccade.explain.hooks.record import record
from saccade.explain.image_explanation import ImageExplanation, answer_of, to_numpy
from saccade.explain.observe import evaluating, normalise
from saccade.explain.scores.importance import by_gradient, by_occlusion
from saccade.explain.subject import Subject

MANY = 64


def explain_clip(
    subject: Subject,
    view: ClipView,
    target: int | str | None = None,
    importance: Sequence[str] = ("gradient",),
    most: int | None = 12,
) -> ImageExplanation:
    """All about one clip; the moving picture shows the `most` important tokens, None for all.

    Occlusion runs the model once a token: beyond MANY tokens only where it is the only kind asked for.
    """
    model = subject.model
    clips = normalise(view.clip[None], subject.mean, subject.std).to(next(model.parameters()))
    with evaluating(model), torch.no_grad(), record(model) as traces:
        output = model(clips)
    answers, number, score, notes = answer_of(subject, output, target)
    arrays = {"clip": view.clip.permute(1, 2, 3, 0).numpy()}
    found: dict[str, np.ndarray] = {}
    figures = [strip_figure(view, traces, subject.name), when_figure(traces, subject.name)]
    last, answer = traces[-1], subject.label(number) if number is not None else "the answer"
    with evaluating(model):
        if number is not None and score is not None:
            responses = token_responses(model, clips)[0, :, number]
            arrays["responses"] = to_numpy(responses)
            figures.append(responding_strip(view, last, responses, answer, subject.name))
            counts = [trace.regions.shape[1] for trace in traces]
            if "gradient" in importance:
                found["gradient"] = to_numpy(by_gradient(model, clips, score, counts)[-1][0])
            if "occlusion" in importance and ("gradient" not in importance or counts[-1] <= MANY):
                found["occlusion"] = to_numpy(by_occlusion(model, clips, score, len(traces) - 1, counts[-1]))
    tokens = order(found, last.regions.shape[1])[:most] if found and most else None
    title = f"The {len(tokens)} tokens that matter most for {answer}" if tokens is not None else "All tubes"
    figures.append(film_figure(view, last, tokens, title, subject.name))
    for trace in traces:
        key = trace.name + (f".{trace.step}" if trace.step else "")
        arrays |= {f"regions/{key}": to_numpy(trace.regions[0]), f"points/{key}": to_numpy(trace.points[0])}
        arrays[f"presence/{key}"] = to_numpy(presence(trace))
    arrays |= {f"importance/{kind}/{last.name}": values for kind, values in found.items()}
    steps = [
        {
            "name": trace.name,
            "step": trace.step,
            "title": f"look {i + 1} of {len(traces)}",
            "tokens": trace.regions.shape[1],
            "grid": list(trace.size),
        }
        for i, trace in enumerate(traces)
    ]
    drawn = {figure.name: figure for figure in figures}
    return ImageExplanation(view.name, answers, answer if number is not None else "", drawn, arrays, steps, notes)
