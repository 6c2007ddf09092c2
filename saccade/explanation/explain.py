"""`saccade.explain(images, model)`: figures and arrays for one or many images."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from saccade._errors import UsageError
from saccade._files import write_file
from saccade.data.decode.inputs import ImageInput, VideoInput, list_inputs
from saccade.explanation.clip_explanation import explain_clip
from saccade.explanation.image_explanation import CENTRE, IMPORTANCE_KINDS, ImageExplainer, ImageExplanation
from saccade.explanation.images import unique_names
from saccade.explanation.subject import load_subject

RENAMED = {"most": "max_tokens", "tell": "on_progress"}


@dataclass
class Explanation:
    """Explanations of all images of one call; displayed by Jupyter, written by `save`."""

    model: str
    weights: str
    trained: bool
    parameters: int
    images: list[ImageExplanation]
    skipped: dict[str, str] = field(default_factory=dict)  # unreadable image -> error

    def __getitem__(self, item: int | str) -> ImageExplanation:
        if isinstance(item, str):
            return {image.name: image for image in self.images}[item]
        return self.images[item]

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        names = [image.name for image in self.images]
        shown = ", ".join(names[:3]) + (f", … ({len(names)} images)" if len(names) > 3 else "")
        return f"Explanation({self.model}: {shown}" + (f"; {len(self.skipped)} skipped)" if self.skipped else ")")

    def html(self) -> str:
        """One self-contained HTML page."""
        from saccade.explanation.report import page

        return page(self)

    def _repr_html_(self) -> str:
        from saccade.explanation.report import page

        return page(self, fragment=True)

    def summary(self) -> dict[str, Any]:
        """Predictions, steps and importance, for JSON."""
        return {
            "model": self.model,
            "weights": self.weights,
            "skipped": self.skipped,
            "images": [
                {
                    "name": image.name,
                    "predictions": [{"class": name, "probability": value} for name, value in image.predictions],
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
        """Write report.html, explanation.json and a folder of PNG files per image; returns the report's path.

        With `arrays`, each image's folder also gets arrays.npz.
        """
        out = Path(out)
        for image in self.images:
            folder = out / Path(image.name).stem
            for name, figure in image.figures.items():
                figure.save(folder / f"{name}.png")
            if arrays:
                folder.mkdir(parents=True, exist_ok=True)
                named: Any = image.arrays  # NumPy types the keywords as allow_pickle: bool
                np.savez_compressed(folder / "arrays.npz", **named)
        write_file(out / "explanation.json", json.dumps(self.summary(), indent=1))
        return write_file(out / "report.html", self.html())


def explain(
    images: ImageInput | VideoInput | Iterable[ImageInput | VideoInput],
    model: nn.Module | str | os.PathLike,
    *,
    target: int | str | None = None,
    labels: Sequence[str] | None = None,
    size: int | None = None,
    full_image: bool = False,
    max_tokens: int = 12,
    importance: Sequence[str] = IMPORTANCE_KINDS,
    anchor: tuple[float, float] = CENTRE,
    stage: int | None = None,
    compare: Sequence[nn.Module | str] = (),
    all_tokens: bool = False,
    device: str | torch.device | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    out: str | os.PathLike | None = None,
    on_progress: Callable[[str], None] | None = None,
    **unknown: NoReturn,
) -> Explanation:
    """Draw the tokens of a model on one or many images.

    Args:
        images: paths, Pillow images, arrays (H, W, 3) or tensors (3, H, W) in [0, 1]; one or many. For a video model
            paths, arrays (T, H, W, 3) or tensors (3, T, H, W).
        model: a module, a model name, or a checkpoint file.
        target: class to explain, by index or name; default: the predicted class.
        labels: class names; default: those of the checkpoint, or ImageNet's for 1000 classes.
        size: side of the input; default: the size the model was made for.
        full_image: keep the aspect ratio of the image instead of the centre crop that `saccade.predict` classifies.
        max_tokens: tokens drawn one by one, most important first.
        importance: any of "gradient" (one backward pass) and "occlusion" (one forward pass per token).
        anchor: position whose attention SViT's figure shows, x y in [0, 1].
        stage: stage, from 1, whose clusters are masked and classified (PaCa Sec. 3.3); default: the last with clusters.
        compare: timm ViTs or Swins, modules or names, whose attention at the anchor is drawn beside SViT's (Fig. 2).
        all_tokens: draw every token one by one; overrides max_tokens.
        seed: of the random weights, if the model has no pretrained ones, and of the random erasing.
        options: keywords of the model, if it is created by name.
        out: folder to save to, as `Explanation.save`.
        on_progress: called with one line of text per image.

    Example:
        >>> photo = saccade.data.photo_paths()["coffee"]
        >>> explanation = saccade.explain(photo, "svit_nano", importance=("gradient",))
        >>> list(explanation.images[0].figures)[0]
        'mosaic'
    """
    for name in unknown:
        hint = f" Use {RENAMED[name]}=." if name in RENAMED else ""
        raise TypeError(f"explain() got an unexpected keyword argument {name!r}.{hint}")
    for kind in importance:
        if kind not in IMPORTANCE_KINDS:
            raise UsageError(f"expected importance of {', '.join(IMPORTANCE_KINDS)}, got {kind!r}.")
    if not all(0 <= value <= 1 for value in anchor):
        raise UsageError(f"expected anchor x, y in [0, 1], got {anchor}.")
    subject = load_subject(model, labels, device, seed, options)
    sources = list_inputs(images, videos=subject.frames > 0)
    if not sources:
        raise ValueError("expected at least one image, got none.")
    explained: list[ImageExplanation] = []
    skipped: dict[str, str] = {}
    limit = None if all_tokens else max_tokens
    for number, (source, name) in enumerate(zip(sources, unique_names(sources), strict=True), 1):
        if on_progress:
            on_progress(f"{name}: {number} of {len(sources)}")
        try:
            if subject.frames:
                if stage is not None or compare:
                    raise UsageError("stage and compare are for image models. Leave them out.")
                clip = subject.clip(source, name, size, full_image)
                explained.append(explain_clip(subject, clip, target, importance, limit))
                continue
            view = subject.view(source, name, size, full_image)
        except UsageError:
            raise
        except ValueError as error:  # one unreadable image among many is reported and skipped
            if len(sources) == 1:
                raise
            skipped[name] = str(error)
            continue
        explainer = ImageExplainer(subject, view, target, anchor, seed, stage, compare)
        explained.append(explainer.explain(importance, limit))
    if not explained:
        raise ValueError("expected a readable image, got none. " + " ".join(skipped.values()))
    parameters = sum(p.numel() for p in subject.model.parameters())
    explanation = Explanation(subject.name, subject.weights, subject.trained, parameters, explained, skipped)
    if out is not None:
        explanation.save(out)
    return explanation
