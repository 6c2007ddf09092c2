"""Scores of a model's tokens on labelled images: as superpixels, as pointers at objects, and as a pixel ranking."""

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from saccade._files import write_file
from saccade.explanation.drawing.density import BANDWIDTH
from saccade.explanation.figures.mosaic import strongest_tokens
from saccade.explanation.images import View, input_size
from saccade.explanation.observe import Observation, Step, eval_mode, observe
from saccade.explanation.scores.curves import Curve, deletion, insertion
from saccade.explanation.scores.ground_truth import Sample, open_ground_truth, read_sample
from saccade.explanation.scores.importance import class_logits, class_score, gradient_importance
from saccade.explanation.scores.maps import pixel_entropy, pointing_game, redundancy, token_entropy
from saccade.explanation.scores.superpixels import IGNORE, evaluate_segments, grid_segments, slic_segments
from saccade.explanation.subject import Subject, load_subject
from saccade.tokens.trace import RegionTrace

MAX_SIDE = 640  # of the ground truth and the image it is compared on
MAX_FULL_MAPS = 512  # tokens whose maps are compared at feature resolution; more are resampled to MAP_SIZE
MAP_SIZE = 56, 56


@dataclass
class Scores:
    """Means over the images of a data set, one row per step (superpixels: and per method)."""

    model: str
    weights: str
    data: str
    images: int
    superpixels: list[dict[str, Any]]
    maps: list[dict[str, Any]]
    pointing: list[dict[str, Any]]
    curves: dict[str, Any]  # deletion and insertion, by token importance and with the importances shuffled
    skipped: dict[str, str] = field(default_factory=dict)  # image -> error

    def summary(self) -> dict[str, Any]:
        """All scores, for JSON."""
        return dict(vars(self))

    def save(self, out: str | os.PathLike) -> Path:
        """Write scores.json, scores.png and scores.html; returns the path of the HTML file."""
        from saccade.explanation.scores.report import chart, page
        from saccade.reports.charts import to_png

        out = Path(out)
        write_file(out / "scores.json", json.dumps(self.summary(), indent=1))
        write_file(out / "scores.png", to_png(chart(self)))
        return write_file(out / "scores.html", page(self))


def score(
    data: str | os.PathLike | Iterable[Sample],
    model: nn.Module | str | os.PathLike,
    *,
    limit: int | None = 50,
    size: int | None = None,
    device: str | torch.device | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    out: str | os.PathLike | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Scores:
    """Score a model's tokens on images with masks or objects (`open_ground_truth`); at most `limit`, None for all.

    The tokens of timm's ViTs and Swins, as baselines, are their patches.
    """
    subject = load_subject(model, device=device, seed=seed, options=options)
    subject.check_size(size)
    table = _Table()
    skipped: dict[str, str] = {}
    count = 0
    with eval_mode(subject.model):
        for name, read in itertools.islice(_entries(data), limit):
            if on_progress:
                on_progress(f"{name}: {count + 1}" + (f" of at most {limit}" if limit else ""))
            try:
                sample = read()
            except ValueError as error:
                skipped[name] = str(error)
                continue
            _score_image(subject, sample, size or subject.size, table, np.random.default_rng([seed, count]))
            count += 1
    if not count:
        raise ValueError("expected at least one labelled image, got none. " + " ".join(skipped.values()))
    name = str(data) if isinstance(data, (str, os.PathLike)) else "samples"
    scores = Scores(subject.name, subject.weights, name, count, *table.means(), skipped)
    if out is not None:
        scores.save(out)
    return scores


def _entries(data: str | os.PathLike | Iterable[Sample]) -> Iterator[tuple[str, Callable[[], Sample]]]:
    """Names and readers of samples."""
    if not isinstance(data, (str, os.PathLike)):
        yield from ((sample.name, partial(Sample, *sample)) for sample in data)
        return
    source = open_ground_truth(data)
    for index in range(len(source)):
        yield os.path.basename(source.name(index)), partial(read_sample, source, index)


class _Table:
    """Values by table, row and column, and their means."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[str, ...]], dict[str, list[float]]] = {}
        self.curves: dict[str, list[Curve]] = {}

    def add(self, table: str, row: tuple[str, ...], **values: float) -> None:
        columns = self.values.setdefault((table, row), {})
        for name, value in values.items():
            columns.setdefault(name, []).append(float(value))

    def means(self) -> tuple[list[dict], list[dict], list[dict], dict[str, Any]]:
        def rows(table: str, *heads: str) -> list[dict[str, Any]]:
            return [
                dict(zip(heads, row, strict=True)) | {name: float(np.mean(each)) for name, each in columns.items()}
                for (name_of_table, row), columns in self.values.items()
                if name_of_table == table
            ]

        curves = {
            name: {
                "area": float(np.mean([curve.area for curve in each])),
                "fraction": each[0].fraction.tolist(),
                "probability": np.mean([curve.probability for curve in each], axis=0).tolist(),
            }
            for name, each in self.curves.items()
        }
        return rows("superpixels", "step", "method"), rows("maps", "step"), rows("pointing", "step", "method"), curves


def _score_image(subject: Subject, sample: Sample, size: int, table: _Table, rng: np.random.Generator) -> None:
    view, mask, boxes = _aligned_view(sample, size, subject.fixed)
    observation = observe(subject.model, view, subject.mean, subject.std)
    for step in observation.main:
        at_full_size = not isinstance(step.trace, RegionTrace) and step.count <= MAX_FULL_MAPS
        maps = step.trace.maps()[0].float() if at_full_size else step.maps(MAP_SIZE)
        table.add(
            "maps",
            (step.title,),
            redundancy=redundancy(maps),
            token_entropy=token_entropy(maps),
            pixel_entropy=pixel_entropy(maps),
        )
        if mask is not None and (mask != IGNORE).any():
            _add_superpixels(step, mask, view.canvas, table)
    importance = _importance(subject, observation)
    if boxes is not None and len(boxes):
        for step in observation.main:
            weights_by_method = {"all tokens": torch.ones(step.count)}
            if importance:
                weights_by_method["important tokens"] = importance[step.index]
            for method, weights in weights_by_method.items():
                values = saliency(step, weights, view.canvas.shape[:2]).numpy()
                table.add("pointing", (step.title, method), **pointing_game(values, boxes)._asdict())
    if importance:
        _add_curves(subject, observation, importance[observation.steps[-1].index], table, rng)


def _aligned_view(sample: Sample, size: int, square: bool = False) -> tuple[View, np.ndarray | None, np.ndarray | None]:
    """View, mask and boxes of the uncropped image; canvas, mask and boxes at most MAX_SIDE pixels long.

    The model's input has the aspect ratio of the image, or is stretched to a square.
    """
    image = sample.image
    scale = min(1.0, MAX_SIDE / max(image.size))
    canvas = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    height, width = (size, size) if square else input_size(image.height, image.width, size)
    pixels = torch.from_numpy(np.array(image.resize((width, height), Image.Resampling.BICUBIC)))
    mask = sample.mask
    if mask is not None and scale < 1:
        mask = np.array(Image.fromarray(mask).resize(canvas.size, Image.Resampling.NEAREST))
    boxes = sample.boxes
    if boxes is not None:
        boxes = boxes * np.tile([canvas.width / image.width, canvas.height / image.height], 2)
    return View(sample.name, pixels.permute(2, 0, 1).float() / 255, np.array(canvas)), mask, boxes


def _add_superpixels(step: Step, mask: np.ndarray, image: np.ndarray, table: _Table) -> None:
    """Metrics of the tokens as segments, and of SLIC and average pooling with as many segments."""
    size = mask.shape[0], mask.shape[1]
    tokens = evaluate_segments(strongest_tokens(step, size)[0], mask)
    table.add("superpixels", (step.title, "tokens"), **tokens._asdict())
    baselines = {
        "SLIC": slic_segments(image, tokens.segments),
        "average pooling": grid_segments(size, tokens.segments),
    }
    for method, labels in baselines.items():
        table.add("superpixels", (step.title, method), **evaluate_segments(labels, mask)._asdict())


def _importance(subject: Subject, observation: Observation) -> list[Tensor]:
    """Positive part of every step's gradient importance for the predicted class; empty for models without classes."""
    try:
        predicted = int(class_logits(observation.output)[0].argmax())
    except ValueError:
        return []
    images = subject.prepare(observation.view.image[None])
    counts = [step.count for step in observation.steps]
    gradients = gradient_importance(subject.model, images, class_score(predicted), counts)
    return [gradient[0].clamp(min=0).cpu() for gradient in gradients]


def saliency(step: Step, weights: Tensor, size: tuple[int, int]) -> Tensor:
    """Weighted sum of the tokens' maps, each normalised to a distribution over pixels: (*size)."""
    total = torch.zeros(size)
    for tokens, maps in step.map_chunks(size, BANDWIDTH):
        distributions = maps / maps.sum((1, 2), keepdim=True).clamp(min=1e-12)
        total += (weights[tokens, None, None].cpu() * distributions).sum(0)
    return total


def _add_curves(
    subject: Subject, observation: Observation, weights: Tensor, table: _Table, rng: np.random.Generator
) -> None:
    predicted = int(class_logits(observation.output)[0].argmax())

    def classify(images: Tensor) -> Tensor:
        logits = class_logits(subject.model(subject.prepare(images)))
        return logits.float().softmax(1)[:, predicted].cpu()

    image = observation.view.image
    size = image.shape[1], image.shape[2]
    rankings = {
        "tokens": saliency(observation.steps[-1], weights, size),
        "random": saliency(observation.steps[-1], weights[rng.permutation(len(weights))], size),
    }
    for method, values in rankings.items():
        table.curves.setdefault(f"deletion, {method}", []).append(deletion(image, values, classify))
        table.curves.setdefault(f"insertion, {method}", []).append(insertion(image, values, classify))


def rows_as_text(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Header and body of a table, numbers with three significant digits."""
    heads = list(rows[0])
    body = [[f"{row[name]:.3g}" if isinstance(row[name], float) else str(row[name]) for name in heads] for row in rows]
    return [heads, *body]
