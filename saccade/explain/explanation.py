"""`saccade.explain(images, model)`: images in, figures and arrays out."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from saccade.explain.figure import Figure, write
from saccade.explain.gallery import gallery, order
from saccade.explain.images import ImageSource, View, as_list, load_view, unique_names
from saccade.explain.importance import Score, by_gradient, by_occlusion, class_logits, class_score
from saccade.explain.mosaic import mosaic, strongest
from saccade.explain.observe import Step, evaluating, normalise, observe
from saccade.explain.paca import classify_clusters, cluster_figure
from saccade.explain.relations import relation_figure, relations
from saccade.explain.sparseformer import (
    DISTURBANCES,
    density,
    disturb,
    disturbed_figure,
    looking_figure,
    responding_figure,
    token_responses,
)
from saccade.explain.subject import Subject, load_subject
from saccade.explain.svit import anchor_figure, effective_attention, super_token_figure
from saccade.explain.vt import assignment_maps
from saccade.tokens.trace import AssignmentTrace, AssociationTrace, RegionTrace

KINDS = ("gradient", "occlusion")


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


@dataclass
class Explanation:
    """All pictures of one run; shows itself in a notebook, writes itself with `save`."""

    model: str
    weights: str
    trained: bool
    parameters: int
    images: list[ImageExplanation]
    skipped: dict[str, str] = field(default_factory=dict)  # pictures that could not be read, and why

    def __getitem__(self, item: int | str) -> ImageExplanation:
        if isinstance(item, str):
            return {image.name: image for image in self.images}[item]
        return self.images[item]

    def __len__(self) -> int:
        return len(self.images)

    def html(self) -> str:
        from saccade.explain.report import page

        return page(self)

    def _repr_html_(self) -> str:
        from saccade.explain.report import fragment

        return fragment(self)

    def summary(self) -> dict[str, Any]:
        """The numbers, for machines."""
        return {
            "model": self.model,
            "weights": self.weights,
            "skipped": self.skipped,
            "images": [
                {
                    "name": image.name,
                    "answers": [{"class": name, "probability": chance} for name, chance in image.answers],
                    "target": image.target,
                    "steps": image.steps,
                    "importance": {
                        key.partition("/")[2]: values.tolist()
                        for key, values in image.arrays.items()
                        if key.startswith("importance/")
                    },
                    "figures": sorted(image.figures),
                    "notes": image.notes,
                }
                for image in self.images
            ],
        }

    def save(self, out: str | os.PathLike, arrays: bool = False) -> Path:
        """Write report.html, explanation.json and a folder of PNG files per picture; gives the report's path."""
        out = Path(out)
        for image in self.images:
            folder = out / Path(image.name).stem
            for name, figure in image.figures.items():
                figure.save(folder / f"{name}.png")
            if arrays:
                folder.mkdir(parents=True, exist_ok=True)
                np.savez_compressed(folder / "arrays.npz", **image.arrays)
        write(out / "explanation.json", json.dumps(self.summary(), indent=1))
        return write(out / "report.html", self.html())


def explain(
    images: ImageSource | Iterable[ImageSource],
    model: nn.Module | str | os.PathLike,
    *,
    target: int | str | None = None,
    labels: Sequence[str] | None = None,
    size: int | None = None,
    most: int = 12,
    importance: Sequence[str] = KINDS,
    anchor: tuple[float, float] = (0.5, 0.5),
    all_tokens: bool = False,
    device: str | torch.device | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    out: str | os.PathLike | None = None,
    tell: Callable[[str], None] | None = None,
) -> Explanation:
    """See what every token of a model sees in one or many pictures.

    Args:
        images: paths, Pillow images, arrays (H, W, 3) or tensors (3, H, W) in [0, 1]; one or many.
        model: a module, a model's name, or a checkpoint file.
        target: class to explain, by number or name; by default what the model answers.
        labels: class names; ImageNet's are known.
        size: about size x size pixels are looked at; by default what the model was made for.
        most: tokens drawn one by one.
        importance: any of "gradient" (one backward pass) and "occlusion" (one forward pass a token).
        anchor: the place whose attention SViT's figure shows, x y in units of the picture.
        all_tokens: draw every token one by one, not only the most important.
        options: keywords of the model, where it is built here by name.
        out: folder to save to, as `Explanation.save`.
        tell: is called with a line of text now and then.
    """
    for kind in importance:
        if kind not in KINDS:
            raise ValueError(f"importance knows {' and '.join(KINDS)}; got {kind!r}.")
    if not all(0 <= value <= 1 for value in anchor):
        raise ValueError(f"the anchor is x, y in units of the picture, each from 0 to 1; got {anchor}.")
    sources = as_list(images)
    if not sources:
        raise ValueError("no images to explain.")
    subject = load_subject(model, labels, device, seed, options)
    explained: list[ImageExplanation] = []
    skipped: dict[str, str] = {}
    for source, name in zip(sources, unique_names(sources), strict=True):
        if tell:
            tell(f"{name}: {len(explained) + len(skipped) + 1} of {len(sources)}")
        try:
            view = load_view(source, size or subject.size, name)
        except ValueError as error:  # one bad picture among many is reported and left out
            if len(sources) == 1:
                raise
            skipped[name] = str(error)
            continue
        explained.append(
            _Picture(subject, view, target, anchor, seed).explain(importance, most if not all_tokens else None)
        )
    if not explained:
        raise ValueError("none of the images can be read. " + " ".join(skipped.values()))
    parameters = sum(p.numel() for p in subject.model.parameters())
    found = Explanation(subject.name, subject.weights, subject.trained, parameters, explained, skipped)
    if out is not None:
        found.save(out)
    return found


class _Picture:
    """The work on one picture."""

    def __init__(self, subject: Subject, view: View, target: int | str | None, anchor: tuple[float, float], seed: int):
        self.subject, self.view, self.anchor, self.seed = subject, view, anchor, seed
        self.device = next(subject.model.parameters()).device
        self.notes: list[str] = []
        self.seen = observe(subject.model, view, subject.mean, subject.std)
        self.answers, self.target, self.score = self._answer(target)
        self.answer = subject.label(self.target) if self.target is not None else "the answer"
        self.name = subject.name

    def explain(self, kinds: Sequence[str], most: int | None) -> ImageExplanation:
        with evaluating(self.subject.model):
            importance = self._importance(kinds)
            figures, arrays = self._figures(importance, most), self._arrays(importance)
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
        return ImageExplanation(
            self.view.name,
            self.answers,
            self.answer if self.target is not None else "",
            {figure.name: figure for figure in figures},
            arrays,
            steps,
            self.notes,
        )

    def _answer(self, target: int | str | None) -> tuple[list[tuple[str, float]], int | None, Score | None]:
        try:
            if getattr(self.subject.model, "num_classes", None) == 0:
                raise ValueError("this model was built without classes.")
            logits = class_logits(self.seen.output)[0].float()
        except ValueError as error:
            if target is not None:
                raise
            self.notes.append(f"No importance: {error}")
            return [], None, None
        if isinstance(target, str):
            names = [self.subject.label(i) for i in range(len(logits))]
            if target not in names and not target.lstrip("-").isdigit():
                raise ValueError(f"this model knows no class {target!r}.")
            target = names.index(target) if target in names else int(target)
        number = int(logits.argmax()) if target is None else target
        score = class_score(number)
        score(self.seen.output)  # names a number that does not exist
        chance, first = logits.softmax(0).topk(min(5, len(logits)))
        answers = [(self.subject.label(int(i)), float(p)) for i, p in zip(first, chance, strict=True)]
        return answers, number % len(logits), score

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
                    found[step]["gradient"] = values[0].cpu().numpy()
            if "occlusion" in kinds:
                last = self.seen.steps[-1]
                drops = by_occlusion(model, images, self.score, last.index, last.count)
                found[last.index]["occlusion"] = drops.float().cpu().numpy()
        except ValueError as error:
            self.notes.append(f"No importance: {error}")
        return found

    def _figures(self, importance: dict[int, dict[str, np.ndarray]], most: int | None) -> list[Figure]:
        seen, name = self.seen, self.name
        last = seen.steps[-1]
        ranked = order(importance[last.index], last.count)
        figures = [mosaic(seen, name)]
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
                figures.append(responding_figure(self.seen, responses, self.answer, self.name))
            except ValueError as error:
                self.notes.append(f"No responses of single tokens: {error}")
        copies = [
            observe(subject.model, disturb(self.view, kind, self.seed), subject.mean, subject.std)
            for kind in DISTURBANCES
        ]
        figures.append(disturbed_figure([self.seen, *copies], self.name))
        return figures

    def _arrays(self, importance: dict[int, dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        arrays: dict[str, np.ndarray] = {"image": self.view.image.permute(1, 2, 0).numpy()}
        size = self.seen.steps[0].image
        for step in self.seen.steps:
            key = step.trace.name + (f".{step.trace.step}" if step.trace.step else "")
            arrays[f"maps/{key}"] = step.trace.maps()[0].float().cpu().numpy()
            for kind, values in importance[step.index].items():
                arrays[f"importance/{kind}/{key}"] = values
        for step in self.seen.main:
            key = step.trace.name + (f".{step.trace.step}" if step.trace.step else "")
            arrays[f"labels/{key}"], arrays[f"lead/{key}"] = strongest(step, size)
            links = relations(step)
            if links is not None:
                arrays[f"relations/{key}"] = links.float().cpu().numpy()
            arrays |= self._family_arrays(step, key, size)
        return arrays

    def _family_arrays(self, step: Step, key: str, size: tuple[int, int]) -> dict[str, np.ndarray]:
        trace = step.trace
        if isinstance(trace, RegionTrace):
            return {
                f"regions/{key}": trace.regions[0].float().cpu().numpy(),
                f"points/{key}": trace.points[0].float().cpu().numpy(),
                f"density/{key}": density(step, size).cpu().numpy(),
            }
        if isinstance(trace, AssociationTrace) and step.attention is not None:
            return {f"anchor/{key}": effective_attention(step, self.anchor).cpu().numpy()}
        return {}

    def _input(self, pictures: Tensor) -> Tensor:
        return normalise(pictures, self.subject.mean, self.subject.std).to(self.device)
