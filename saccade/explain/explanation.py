"""`saccade.explain(images, model)`: images in, figures and arrays out."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from saccade.explain.clip_explanation import explain_clip
from saccade.explain.clips import as_clips, load_clip
from saccade.explain.drawing.figure import write
from saccade.explain.image_explanation import KINDS, ImageExplanation, explain_view
from saccade.explain.images import ImageSource, as_list, load_view, unique_names
from saccade.explain.subject import load_subject


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
        images: paths, Pillow images, arrays (H, W, 3) or tensors (3, H, W) in [0, 1]; one or many. For a video model
            paths, arrays (T, H, W, 3) or tensors (3, T, H, W).
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
    subject = load_subject(model, labels, device, seed, options)
    sources = as_clips(images) if subject.frames else as_list(images)
    if not sources:
        raise ValueError("no images to explain.")
    explained: list[ImageExplanation] = []
    skipped: dict[str, str] = {}
    for source, name in zip(sources, unique_names(sources), strict=True):
        if tell:
            tell(f"{name}: {len(explained) + len(skipped) + 1} of {len(sources)}")
        drawn = None if all_tokens else most
        try:
            if subject.frames:
                clip = load_clip(source, size or subject.size, subject.frames, subject.stride, name)
                explained.append(explain_clip(subject, clip, target, importance, drawn))
                continue
            view = load_view(source, size or subject.size, name)
        except ValueError as error:  # one bad picture among many is reported and left out
            if len(sources) == 1:
                raise
            skipped[name] = str(error)
            continue
        explained.append(explain_view(subject, view, target, importance, drawn, anchor, seed))
    if not explained:
        raise ValueError("none of the images can be read. " + " ".join(skipped.values()))
    parameters = sum(p.numel() for p in subject.model.parameters())
    found = Explanation(subject.name, subject.weights, subject.trained, parameters, explained, skipped)
    if out is not None:
        found.save(out)
    return found
