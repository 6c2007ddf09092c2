"""One picture: what the model answers, every figure its steps allow, every array behind them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from saccade.explain.drawing.figure import Figure
from saccade.explain.figures.detections import found_figure
from saccade.explain.figures.gallery import gallery, order
from saccade.explain.figures.mosaic import mosaic, strongest
from saccade.explain.figures.paca import classify_clusters, cluster_figure
from saccade.explain.figures.relations import relation_figure, relations
from saccade.explain.figures.sparseformer import (
    DISTURBANCES,
    density,
    disturb,
    disturbed_figure,
    looking_figure,
    responding_figure,
    token_responses,
)
from saccade.explain.figures.svit import anchor_figure, effective_attention, super_token_figure
from saccade.explain.figures.vt import assignment_maps
from saccade.explain.images import View
from saccade.explain.observe import Step, evaluating, normalise, observe
from saccade.explain.scores.importance import Score, by_gradient, by_occlusion, class_logits, class_score
from saccade.explain.subject import Subject
from saccade.tokens.trace import AssignmentTrace, AssociationTrace, RegionTrace

KINDS = ("gradient", "occlusion")
LARGEST = 1 << 24  # values of a step's maps that are kept as an array


@dataclass
class ImageExplanation:
    """One picture: what was answered, drawn and measured."""

    name: str
    answers: list[tuple[str, float]]  # the first five: class and probability; empty without a classifier
    target: str  # the class that importance is about
    figures: dict[str, Figure]
    arrays: dict[str, np.ndarray]  # "maps/stages.0.blocks.0", "importance/…", "labels/…"
    steps: list[dict[str, Any]]  # name, title, tokens and grid of every recorded step
    notes: list[str] = field(default_factory=list)  # what could not be done, and why


def explain_view(
    subject: Subject,
    view: View,
    target: int | str | None = None,
    importance: Sequence[str] = KINDS,
    most: int | None = 12,
    anchor: tuple[float, float] = (0.5, 0.5),
    seed: int = 0,
) -> ImageExplanation:
    """All about one view; `most` tokens are drawn one by one, None for all. See `saccade.explain` for the rest."""
    return _Work(subject, view, target, anchor, seed).explain(importance, most)


def answer_of(
    subject: Subject, output: Any, target: int | str | None
) -> tuple[list[tuple[str, float]], int | None, Score | None, list[str]]:
    """The first five answers, the number of the class to explain and its score; or a note why there is none."""
    try:
        if getattr(subject.model, "num_classes", None) == 0:
            raise ValueError("this model was built without classes.")
        logits = class_logits(output)[0].float()
    except ValueError as error:
        if target is not None:
            raise
        return [], None, None, [f"No importance: {error}"]
    if isinstance(target, str):
        names = [subject.label(i) for i in range(len(logits))]
        if target not in names and not target.lstrip("-").isdigit():
            raise ValueError(f"this model knows no class {target!r}.")
        target = names.index(target) if target in names else int(target)
    number = int(logits.argmax()) if target is None else target
    score = class_score(number)
    score(output)  # names a number that does not exist
    chance, first = logits.softmax(0).topk(min(5, len(logits)))
    answers = [(subject.label(int(i)), float(p)) for i, p in zip(first, chance, strict=True)]
    return answers, number % len(logits), score, []


class _Work:
    """All figures and arrays of one picture, in the order they are drawn."""

    def __init__(self, subject: Subject, view: View, target: int | str | None, anchor: tuple[float, float], seed: int):
        self.subject, self.view, self.anchor, self.seed = subject, view, anchor, seed
        self.device = next(subject.model.parameters()).device
        self.notes: list[str] = []
        self.arrays: dict[str, np.ndarray] = {"image": view.image.permute(1, 2, 0).numpy()}
        self.seen = observe(subject.model, view, subject.mean, subject.std)
        self.answers, self.target, self.score, notes = answer_of(subject, self.seen.output, target)
        self.notes += notes
        self.answer = subject.label(self.target) if self.target is not None else "the answer"
        self.name = subject.name

    def explain(self, kinds: Sequence[str], most: int | None) -> ImageExplanation:
        with evaluating(self.subject.model):
            importance = self._importance(kinds)
            figures = self._figures(importance, most)
            self._keep_arrays(importance)
        steps = [
            {
                "name": step.trace.name,
                "step": step.trace.step,
                "title": step.title,
                "tokens": step.count,
                "grid": list(step.trace.size),
            }
            for step in self.seen.steps
        ]
        drawn = {figure.name: figure for figure in figures}
        target = self.answer if self.target is not None else ""
        return ImageExplanation(self.view.name, self.answers, target, drawn, self.arrays, steps, self.notes)

    def _importance(self, kinds: Sequence[str]) -> dict[int, dict[str, np.ndarray]]:
        """By step and kind: the gradient for every step, occlusion (dearer) for the last."""
        found: dict[int, dict[str, np.ndarray]] = {step.index: {} for step in self.seen.steps}
        if self.score is None or not kinds:
            return found
        model, images = self.subject.model, self._input(self.view.image[None])
        try:
            if "gradient" in kinds:
                counts = [step.count for step in self.seen.steps]
                for step, values in enumerate(by_gradient(model, images, self.score, counts)):
                    found[step]["gradient"] = to_numpy(values[0])
            if "occlusion" in kinds:
                last = self.seen.steps[-1]
                drops = by_occlusion(model, images, self.score, last.index, last.count)
                found[last.index]["occlusion"] = to_numpy(drops)
        except ValueError as error:
            self.notes.append(f"No importance: {error}")
        return found

    def _figures(self, importance: dict[int, dict[str, np.ndarray]], most: int | None) -> list[Figure]:
        seen, name = self.seen, self.name
        last = seen.steps[-1]
        ranked = order(importance[last.index], last.count)
        figures = [mosaic(seen, name)]
        if self.subject.detector is not None:
            figures.insert(0, found_figure(self.subject.detector, self.view, self.subject.labels or (), name))
        supers = [step for step in seen.main if isinstance(step.trace, AssociationTrace)]
        if supers:
            figures.append(super_token_figure(seen, supers, self.anchor, name))
            figures.append(anchor_figure(seen, supers, self.anchor, name))
        figures += self._assignment_figures(ranked, most)
        if isinstance(last.trace, RegionTrace):
            figures += self._region_figures()
        figures.append(
            gallery(seen, last, importance[last.index], self.answer, name, last.count if most is None else most)
        )
        figures.append(relation_figure(seen, name))
        return [figure for figure in figures if figure is not None]

    def _assignment_figures(self, ranked: np.ndarray, most: int | None) -> list[Figure]:
        steps = [step for step in self.seen.main if isinstance(step.trace, AssignmentTrace)]
        figures = []
        for step in steps:
            if step.count <= 16 or most is None:
                figure = assignment_maps(self.seen, step, self.name)
            elif step is steps[-1]:
                figure = assignment_maps(self.seen, step, self.name, ranked[: most + most % 2])
            else:
                continue
            figures.append(figure._replace(name=f"assignment-{step.index + 1}"))
        with_scores = [step for step in steps if step.trace.scores is not None]
        if with_scores and self.target is not None:
            step = with_scores[-1]
            clusters = classify_clusters(
                self.subject.model, step, self.view.image.to(self.device), self._input, self.target
            )
            self.arrays[f"clusters/probability/{key_of(step)}"] = to_numpy(clusters.probability)
            self.arrays[f"clusters/positive/{key_of(step)}"] = clusters.positive.cpu().numpy()
            figures.append(
                cluster_figure(self.seen, step, clusters, self.answer, self.name, None if most is None else 3)
            )
        return figures

    def _region_figures(self) -> list[Figure]:
        subject = self.subject
        figures = [looking_figure(self.seen, self.name)]
        if self.target is not None and hasattr(subject.model, "forward_head"):
            try:
                responses = token_responses(subject.model, self._input(self.view.image[None]))[0, :, self.target]
                self.arrays[f"responses/{key_of(self.seen.steps[-1])}"] = to_numpy(responses)
                figures.append(responding_figure(self.seen, responses, self.answer, self.name))
            except ValueError as error:
                self.notes.append(f"No responses of single tokens: {error}")
        copies = [
            observe(subject.model, disturb(self.view, kind, self.seed), subject.mean, subject.std)
            for kind in DISTURBANCES
        ]
        figures.append(disturbed_figure([self.seen, *copies], self.name))
        return figures

    def _keep_arrays(self, importance: dict[int, dict[str, np.ndarray]]) -> None:
        arrays, size, large = self.arrays, self.seen.steps[0].image, []
        for step in self.seen.steps:
            key = key_of(step)
            if step.count * step.trace.size[0] * step.trace.size[1] <= LARGEST:
                arrays[f"maps/{key}"] = to_numpy(step.trace.maps()[0])
            else:
                large.append(key)
            for kind, values in importance[step.index].items():
                arrays[f"importance/{kind}/{key}"] = values
        if large:
            self.notes.append(f"Maps too large to keep as arrays: {', '.join(large)}. saccade.record has the traces.")
        for step in self.seen.main:
            key, trace, links = key_of(step), step.trace, relations(step)
            arrays[f"labels/{key}"], arrays[f"lead/{key}"] = strongest(step, size)
            if links is not None:
                arrays[f"relations/{key}"] = to_numpy(links)
            if isinstance(trace, RegionTrace):
                arrays[f"regions/{key}"] = to_numpy(trace.regions[0])
                arrays[f"points/{key}"] = to_numpy(trace.points[0])
                arrays[f"density/{key}"] = to_numpy(density(step, size))
            elif isinstance(trace, AssociationTrace) and step.attention is not None:
                arrays[f"anchor/{key}"] = to_numpy(effective_attention(step, self.anchor))

    def _input(self, pictures: Tensor) -> Tensor:
        return normalise(pictures, self.subject.mean, self.subject.std).to(next(self.subject.model.parameters()))


def key_of(step: Step) -> str:
    """A step's name among the arrays: its block, and which of its passes if there are several."""
    return step.trace.name + (f".{step.trace.step}" if step.trace.step else "")


def to_numpy(values: Tensor) -> np.ndarray:
    return values.detach().float().cpu().numpy()
