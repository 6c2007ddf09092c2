"""Numbers no paper has: tokens as superpixels, as pointers at objects, as an order of pixels; alike and how wide."""

import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from saccade.explain.drawing.density import BANDWIDTH
from saccade.explain.drawing.figure import write
from saccade.explain.figures.mosaic import strongest
from saccade.explain.images import View, frame
from saccade.explain.observe import Observation, Step, evaluating, normalise, observe
from saccade.explain.scores.curves import Curve, deletion, insertion
from saccade.explain.scores.importance import by_gradient, class_logits, class_score
from saccade.explain.scores.labelled import Entry, Sample, read_labelled
from saccade.explain.scores.overlap import doubt, redundancy, width
from saccade.explain.scores.pointing import point
from saccade.explain.scores.superpixels import IGNORE, grid, judge, slic
from saccade.explain.subject import Subject, load_subject
from saccade.tokens.trace import RegionTrace

LONGEST = 640  # truth is compared at this size at most


@dataclass
class Scores:
    """Means over the pictures of a data set, one row for every stage (superpixels: and for each rival)."""

    model: str
    weights: str
    data: str
    pictures: int
    superpixels: list[dict[str, Any]]
    maps: list[dict[str, Any]]
    pointing: list[dict[str, Any]]
    curves: dict[str, Any]  # deletion and insertion, by the tokens and at random
    skipped: dict[str, str] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        return dict(vars(self))

    def save(self, out: str | os.PathLike) -> Path:
        """Write scores.json, scores.png and scores.html; gives the page's path."""
        from saccade.explain.scores.report import chart, page

        out = Path(out)
        write(out / "scores.json", json.dumps(self.summary(), indent=1))
        write(out / "scores.png", chart(self, "png"))
        return write(out / "scores.html", page(self))


def score(
    data: str | os.PathLike | Iterable[Entry | Sample],
    model: nn.Module | str | os.PathLike,
    *,
    limit: int | None = 50,
    size: int | None = None,
    device: str | torch.device | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    out: str | os.PathLike | None = None,
    tell: Callable[[str], None] | None = None,
) -> Scores:
    """Score a model's tokens on pictures with a known truth (see `labelled`); `limit` pictures, None for all."""
    subject = load_subject(model, device=device, seed=seed, options=options)
    entries = read_labelled(data) if isinstance(data, (str, os.PathLike)) else data
    table = _Table()
    skipped: dict[str, str] = {}
    count = 0
    with evaluating(subject.model):
        for entry in itertools.islice(entries, limit):
            if tell:
                tell(f"{entry.name}: {count + 1}" + (f" of at most {limit}" if limit else ""))
            try:
                sample = entry.read() if isinstance(entry, Entry) else entry
            except ValueError as error:  # one bad picture among many is reported and left out
                skipped[entry.name] = str(error)
                continue
            _score_one(subject, sample, size or subject.size, table, np.random.default_rng([seed, count]))
            count += 1
    if not count:
        raise ValueError("nothing to score. " + " ".join(skipped.values()))
    name = str(data) if isinstance(data, (str, os.PathLike)) else "samples"
    found = Scores(subject.name, subject.weights, name, count, *table.means(), skipped)
    if out is not None:
        found.save(out)
    return found


class _Table:
    """Values by kind, row and column, and their means."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[str, ...]], dict[str, list[float]]] = {}
        self.curves: dict[str, list[Curve]] = {}

    def add(self, kind: str, row: tuple[str, ...], **values: float) -> None:
        columns = self.values.setdefault((kind, row), {})
        for name, value in values.items():
            columns.setdefault(name, []).append(float(value))

    def means(self) -> tuple[list[dict], list[dict], list[dict], dict[str, Any]]:
        def rows(kind: str, *heads: str) -> list[dict[str, Any]]:
            return [
                dict(zip(heads, row, strict=True)) | {name: float(np.mean(each)) for name, each in columns.items()}
                for (found, row), columns in self.values.items()
                if found == kind
            ]

        curves = {
            name: {
                "area": float(np.mean([curve.area for curve in each])),
                "share": each[0].share.tolist(),
                "probability": np.mean([curve.probability for curve in each], axis=0).tolist(),
            }
            for name, each in self.curves.items()
        }
        return rows("superpixels", "step", "by"), rows("maps", "step"), rows("pointing", "step", "by"), curves


def _score_one(subject: Subject, sample: Sample, size: int, table: _Table, random: np.random.Generator) -> None:
    view, mask, boxes = _same_frame(sample, size)
    seen = observe(subject.model, view, subject.mean, subject.std)
    for step in seen.main:
        own = not isinstance(step.trace, RegionTrace) and step.count <= 512  # else at a size that fits the memory
        maps = step.trace.maps()[0].float() if own else step.maps((56, 56))
        table.add("maps", (step.title,), redundancy=redundancy(maps), width=width(maps), doubt=doubt(maps))
        if mask is not None and (mask != IGNORE).any():
            labels, _ = strongest(step, mask.shape)
            _compare(labels, mask, view.picture, step, table)
    importance = _gradients(subject, seen)
    if boxes is not None and len(boxes):
        for step in seen.main:
            sums = {"all tokens": torch.ones(step.count)}
            if importance:
                sums["important tokens"] = importance[step.index]
            for by, weights in sums.items():
                values = saliency(step, weights, view.picture.shape[:2]).numpy()
                table.add("pointing", (step.title, by), **point(values, boxes)._asdict())
    if importance:
        _add_curves(subject, seen, importance[seen.steps[-1].index], table, random)


def _same_frame(sample: Sample, size: int) -> tuple[View, np.ndarray | None, np.ndarray | None]:
    """Picture, mask and boxes without cutting: the model sees the whole, the truth is at most LONGEST long."""
    picture = sample.picture
    scale = min(1.0, LONGEST / max(picture.size))
    drawn = picture.resize((round(picture.width * scale), round(picture.height * scale)), Image.Resampling.BICUBIC)
    height, width = frame(picture.height, picture.width, size)
    seen = np.array(picture.resize((width, height), Image.Resampling.BICUBIC))
    mask = sample.mask
    if mask is not None and scale < 1:
        mask = np.array(Image.fromarray(mask).resize(drawn.size, Image.Resampling.NEAREST))
    boxes = sample.boxes
    if boxes is not None:
        boxes = boxes * np.tile([drawn.width / picture.width, drawn.height / picture.height], 2)
    image = torch.from_numpy(seen).permute(2, 0, 1).float() / 255
    return View(sample.name, image, np.array(drawn)), mask, boxes


def _compare(labels: np.ndarray, mask: np.ndarray, picture: np.ndarray, step: Step, table: _Table) -> None:
    ours = judge(labels, mask)
    rivals = {"SLIC": slic(picture, ours.segments), "average pooling": grid(mask.shape, ours.segments)}
    table.add("superpixels", (step.title, "tokens"), **ours._asdict())
    for by, rival in rivals.items():
        table.add("superpixels", (step.title, by), **judge(rival, mask)._asdict())


def _gradients(subject: Subject, seen: Observation) -> list[Tensor]:
    """Importance of every step's tokens for the answer, not negative; nothing for models without classes."""
    try:
        answer = int(class_logits(seen.output)[0].argmax())
    except ValueError:
        return []
    images = normalise(seen.view.image[None], subject.mean, subject.std).to(next(subject.model.parameters()))
    counts = [step.count for step in seen.steps]
    return [found[0].clamp(min=0).cpu() for found in by_gradient(subject.model, images, class_score(answer), counts)]


def saliency(step: Step, weights: Tensor, size: tuple[int, int]) -> Tensor:
    """Where the tokens look, each as a distribution over pixels, weighted: (*size)."""
    total = torch.zeros(size)
    for start in range(0, step.count, 64):
        chosen = range(start, min(start + 64, step.count))
        maps = step.maps(size, chosen, BANDWIDTH).cpu()
        shares = maps / maps.sum((1, 2), keepdim=True).clamp(min=1e-12)
        total += (weights[list(chosen), None, None].cpu() * shares).sum(0)
    return total


def _add_curves(
    subject: Subject, seen: Observation, weights: Tensor, table: _Table, random: np.random.Generator
) -> None:
    like = next(subject.model.parameters())
    answer = int(class_logits(seen.output)[0].argmax())

    def classify(pictures: Tensor) -> Tensor:
        logits = class_logits(subject.model(normalise(pictures, subject.mean, subject.std).to(like)))
        return logits.float().softmax(1)[:, answer].cpu()

    image = seen.view.image
    size = image.shape[1], image.shape[2]
    orders = {
        "tokens": saliency(seen.steps[-1], weights, size),
        "random": torch.from_numpy(random.random(size)),
    }
    for by, values in orders.items():
        table.curves.setdefault(f"deletion, {by}", []).append(deletion(image, values, classify))
        table.curves.setdefault(f"insertion, {by}", []).append(insertion(image, values, classify))


def rows_as_text(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A table's head and body, numbers to three digits."""
    heads = list(rows[0])
    body = [[f"{row[name]:.3g}" if isinstance(row[name], float) else str(row[name]) for name in heads] for row in rows]
    return [heads, *body]
