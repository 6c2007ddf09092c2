"""Explanation of one image: predictions, the figures its steps allow, and their arrays."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from saccade._errors import UsageError
from saccade.explanation.drawing.figure import Figure
from saccade.explanation.figures.attention import baseline_attention, comparison_figure, super_token_attention
from saccade.explanation.figures.detections import detection_figure
from saccade.explanation.figures.gallery import gallery_figure, rank_tokens
from saccade.explanation.figures.mosaic import mosaic_figure, strongest_tokens
from saccade.explanation.figures.paca import classify_clusters, cluster_figure
from saccade.explanation.figures.relations import relation_figure, token_relations
from saccade.explanation.figures.sparseformer import (
    PERTURBATIONS,
    image_response_figure,
    perturb,
    perturbed_figure,
    sampling_density,
    sampling_figure,
    token_responses,
)
from saccade.explanation.figures.svit import anchor_figure, effective_attention, super_token_figure
from saccade.explanation.figures.vt import assignment_figure
from saccade.explanation.images import View
from saccade.explanation.observe import Step, eval_mode, observe, step_summary
from saccade.explanation.scores.importance import (
    Score,
    class_logits,
    class_score,
    gradient_importance,
    occlusion_importance,
)
from saccade.explanation.subject import Subject
from saccade.tokens.trace import AssignmentTrace, AssociationTrace, RegionTrace

IMPORTANCE_KINDS = ("gradient", "occlusion")
CENTRE = (0.5, 0.5)  # of an image, x and y
MAX_ARRAY = 1 << 24  # values of a step's maps that are stored as an array

StepImportance = dict[int, dict[str, np.ndarray]]  # step index -> kind -> (M,)


@dataclass
class ImageExplanation:
    """Predictions, figures and arrays of one image or clip."""

    name: str
    predictions: list[tuple[str, float]]  # top five: class and probability; empty without a classifier
    target: str  # class that importance refers to; empty without a classifier
    figures: dict[str, Figure]
    arrays: dict[str, np.ndarray]  # "maps/stages.0.blocks.0", "importance/…", "labels/…"
    steps: list[dict[str, Any]]  # name, title, tokens and grid of every recorded step
    notes: list[str] = field(default_factory=list)  # what could not be computed, and why

    def __repr__(self) -> str:
        predicted = ", ".join(f"{name} {100 * value:.1f} %" for name, value in self.predictions[:1]) or "no classes"
        return f"ImageExplanation({self.name}: {predicted}, {len(self.figures)} figures, {len(self.arrays)} arrays)"


class Target(NamedTuple):
    """The class to explain."""

    predictions: list[tuple[str, float]]  # top five: class and probability
    index: int | None  # of the class; None without class logits
    score: Score | None
    notes: list[str]
    name: str = "the prediction"

    @property
    def target(self) -> str:
        """Name of the class; empty without class logits."""
        return self.name if self.index is not None else ""


def resolve_target(subject: Subject, output: Any, target: int | str | None) -> Target:
    """Top predictions and the class to explain: `target` by index or name, else the predicted class.

    For outputs without class logits the target has a note instead, or a ValueError is raised if a class was requested.
    """
    try:
        if getattr(subject.model, "num_classes", None) == 0:
            raise ValueError("expected a model with classes, got num_classes=0.")
        logits = class_logits(output)[0].float()
    except ValueError as error:
        if target is not None:
            raise
        return Target([], None, None, [f"No importance: {error}"])
    if isinstance(target, str):
        names = [subject.label(i) for i in range(len(logits))]
        if target not in names and not (target.isdecimal() and int(target) < len(names)):
            last = len(names) - 1
            raise UsageError(f"expected the name or index (0 to {last}) of a class of this model, got {target!r}.")
        target = names.index(target) if target in names else int(target)
    index = int(logits.argmax()) if target is None else target
    score = class_score(index)
    score(output)  # raises for an index out of range
    predicted = int(logits.argmax())
    probability, top = subject.probabilities(logits).topk(min(5, len(logits)))
    predictions = [(subject.label(int(i)), float(p)) for i, p in zip(top, probability, strict=True)]
    index %= len(logits)
    notes = []
    if index != predicted:  # PaCa Sec. 3.3 studies images classified correctly
        notes.append(
            f"The target {subject.label(index)} is not the prediction, {subject.label(predicted)}: tokens and clusters "
            "are ranked by a class that the model does not choose."
        )
    return Target(predictions, index, score, notes, subject.label(index))


class ImageExplainer:
    """Computes the figures and arrays of one image, in drawing order; arguments as in `saccade.explain`."""

    def __init__(
        self,
        subject: Subject,
        view: View,
        target: int | str | None,
        anchor: tuple[float, float],
        seed: int,
        stage: int | None,
        compare: Sequence[nn.Module | str],
    ):
        self.subject, self.view, self.anchor, self.seed = subject, view, anchor, seed
        self.stage, self.compare = stage, compare
        self.device = next(subject.model.parameters()).device
        self.arrays: dict[str, np.ndarray] = {"image": view.image.permute(1, 2, 0).numpy()}
        self.observation = observe(subject.model, view, subject.mean, subject.std)
        self.target = resolve_target(subject, self.observation.output, target)
        self.notes = list(self.target.notes)
        self.class_name, self.model_name = self.target.name, subject.name

    def explain(self, kinds: Sequence[str], max_tokens: int | None) -> ImageExplanation:
        """`max_tokens` tokens are drawn one by one, None for all."""
        with eval_mode(self.subject.model):
            importance = self._importance(kinds)
            figures = self._figures(importance, max_tokens)
            self._add_arrays(importance)
        steps = [step_summary(step.trace, step.title) for step in self.observation.steps]
        by_name = {figure.name: figure for figure in figures}
        target = self.target
        return ImageExplanation(
            self.view.name, target.predictions, target.target, by_name, self.arrays, steps, self.notes
        )

    def _importance(self, kinds: Sequence[str]) -> StepImportance:
        """Gradient importance of every step, occlusion (one forward pass per token) of the last."""
        steps = self.observation.steps
        importance: StepImportance = {step.index: {} for step in steps}
        if self.target.score is None or not kinds:
            return importance
        model, images = self.subject.model, self.subject.prepare(self.view.image[None])
        try:
            if "gradient" in kinds:
                counts = [step.count for step in steps]
                for index, values in enumerate(gradient_importance(model, images, self.target.score, counts)):
                    importance[index]["gradient"] = to_numpy(values[0])
            if "occlusion" in kinds:
                last = steps[-1]
                drops = occlusion_importance(model, images, self.target.score, last.index, last.count)
                importance[last.index]["occlusion"] = to_numpy(drops)
        except ValueError as error:
            self.notes.append(f"No importance: {error}")
        return importance

    def _figures(self, importance: StepImportance, max_tokens: int | None) -> list[Figure]:
        observation, name = self.observation, self.model_name
        last = observation.steps[-1]
        ranked = rank_tokens(importance[last.index], last.count)
        figures: list[Figure | None] = [mosaic_figure(observation, name)]
        if self.subject.detector is not None:
            figures.insert(0, detection_figure(self.subject.detector, self.view, self.subject.labels or (), name))
        super_token_steps = [step for step in observation.main if isinstance(step.trace, AssociationTrace)]
        if super_token_steps:
            figures.append(super_token_figure(observation, super_token_steps, self.anchor, name))
            figures.append(anchor_figure(observation, super_token_steps, self.anchor, name))
        elif self.anchor != CENTRE:
            raise UsageError(f"anchor is for super token attention (svit_*), got {name}. Leave it out.")
        if self.compare:
            figures.append(self._comparison(super_token_steps))
        figures += self._assignment_figures(ranked, max_tokens)
        if isinstance(last.trace, RegionTrace):
            figures += self._region_figures()
        limit = last.count if max_tokens is None else max_tokens
        figures.append(gallery_figure(observation, last, importance[last.index], self.class_name, name, limit))
        figures.append(relation_figure(observation, name))
        return [figure for figure in figures if figure is not None]

    def _comparison(self, steps: list[Step]) -> Figure:
        """The first super token attention beside the first attention of other models (SViT Fig. 2)."""
        if not steps or steps[0].attention is None:
            raise UsageError(f"compare is for super token attention (svit_*), got {self.model_name}. Leave it out.")
        rows = [baseline_attention(model, self.view.image, self.anchor) for model in self.compare]
        rows.append(super_token_attention(steps[0], self.anchor, self.model_name))
        for row in rows:
            self.arrays[f"attention/{row.model}"] = to_numpy(row.map)
        return comparison_figure(self.view, rows, self.anchor)

    def _assignment_figures(self, ranked: np.ndarray, max_tokens: int | None) -> list[Figure]:
        """Assignment maps of steps with few tokens and of the last step, and PaCa's clusters."""
        steps = [(step, step.trace) for step in self.observation.main if isinstance(step.trace, AssignmentTrace)]
        figures = []
        for step, _ in steps:
            if step.count <= 16 or max_tokens is None:
                figure = assignment_figure(self.observation, step, self.model_name)
            elif step is steps[-1][0]:
                tokens = ranked[: max_tokens + max_tokens % 2]
                figure = assignment_figure(self.observation, step, self.model_name, tokens)
            else:
                continue
            figures.append(figure._replace(name=f"assignment-{step.index + 1}"))
        with_scores = self._cluster_steps([step for step, trace in steps if trace.scores is not None])
        if with_scores and self.target.index is not None:
            step, image = with_scores[-1], self.view.image.to(self.device)
            subject, index = self.subject, self.target.index
            options = {"multi_label": subject.multi_label}
            clusters = classify_clusters(subject.model, step, image, subject.prepare, index, **options)
            self.arrays[f"clusters/probability/{step.array_key}"] = to_numpy(clusters.probability)
            self.arrays[f"clusters/positive/{step.array_key}"] = clusters.positive.cpu().numpy()
            top = None if max_tokens is None else 3
            figures.append(cluster_figure(self.observation, step, clusters, self.class_name, self.model_name, top))
        return figures

    def _cluster_steps(self, steps: list[Step]) -> list[Step]:
        """Steps with clusters, of stage `self.stage` if given; PaCa does not say which one its study uses."""
        if self.stage is None:
            return steps
        chosen = [step for step in steps if f"stages.{self.stage - 1}." in f"{step.trace.name}."]
        if not chosen:
            names = ", ".join(step.title for step in steps) or "none"
            raise UsageError(
                f"expected a stage with clusters, got {self.stage}. {self.model_name} has clusters in: {names}."
            )
        return chosen

    def _region_figures(self) -> list[Figure]:
        """SparseFormer's figures: sampling, token responses, perturbed inputs."""
        subject, observation = self.subject, self.observation
        figures = [sampling_figure(observation, self.model_name)]
        if self.target.index is not None and hasattr(subject.model, "forward_head"):
            try:
                images = subject.prepare(self.view.image[None])
                responses = token_responses(subject.model, images)[0, :, self.target.index]
                self.arrays[f"responses/{observation.steps[-1].array_key}"] = to_numpy(responses)
                figures.append(image_response_figure(observation, responses, self.class_name, self.model_name))
            except ValueError as error:
                self.notes.append(f"No token responses: {error}")
        perturbed = [
            observe(subject.model, perturb(self.view, kind, self.seed), subject.mean, subject.std)
            for kind in PERTURBATIONS
        ]
        figures.append(perturbed_figure([observation, *perturbed], self.model_name))
        return figures

    def _add_arrays(self, importance: StepImportance) -> None:
        arrays, size, too_large = self.arrays, self.observation.steps[0].image_size, []
        for step in self.observation.steps:
            if step.count * step.trace.size[0] * step.trace.size[1] <= MAX_ARRAY:
                arrays[f"maps/{step.array_key}"] = to_numpy(step.trace.maps()[0])
            else:
                too_large.append(step.array_key)
            for kind, values in importance[step.index].items():
                arrays[f"importance/{kind}/{step.array_key}"] = values
        if too_large:
            self.notes.append(f"Maps too large for arrays: {', '.join(too_large)}. Use saccade.record for the traces.")
        for step in self.observation.main:
            key, trace, relations = step.array_key, step.trace, token_relations(step)
            arrays[f"labels/{key}"], arrays[f"dominance/{key}"] = strongest_tokens(step, size)
            if relations is not None:
                arrays[f"relations/{key}"] = to_numpy(relations)
            if isinstance(trace, RegionTrace):
                arrays[f"regions/{key}"] = to_numpy(trace.regions[0])
                arrays[f"points/{key}"] = to_numpy(trace.points[0])
                arrays[f"density/{key}"] = to_numpy(sampling_density(step, size))
            elif isinstance(trace, AssociationTrace) and step.attention is not None:
                arrays[f"anchor/{key}"] = to_numpy(effective_attention(step, self.anchor))


def to_numpy(values: Tensor) -> np.ndarray:
    """A detached float32 copy on the CPU."""
    return values.detach().float().cpu().numpy()
