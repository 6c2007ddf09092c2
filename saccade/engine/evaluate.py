"""What a trained model is worth: accuracy, calibration, confusion, and its best and worst pictures."""

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.data.loader import Batch
from saccade.data.open import find_video_splits, open_split
from saccade.data.sources.base import DataError, Source, check_labels
from saccade.data.transforms.batch import normalize, resize
from saccade.engine.feed import BadPictures, evaluation_batches
from saccade.models.card import Card, Preprocess, open_model
from saccade.tasks.classification import accuracy_metrics, per_class
from saccade.tasks.video import average_views

MANY = 1000  # classes beyond which no confusion matrix is kept


class Evaluation(NamedTuple):
    """Percentages, and tensors in the order of the source."""

    count: int
    loss: float
    top1: float
    top5: float
    calibration: float  # expected calibration error, 15 bins
    per_class: list[float | None]  # None for a class without pictures
    confusion: Tensor | None  # (K, K): true, predicted
    indices: Tensor  # (N,) of the pictures in their source
    labels: Tensor  # (N,)
    losses: Tensor  # (N,)
    predicted: Tensor  # (N,)
    confidence: Tensor  # (N,) probability of the prediction
    bad: int  # pictures that could not be read

    def summary(self) -> dict[str, Any]:
        """The numbers, for JSON."""
        names = ("count", "loss", "top1", "top5", "calibration", "bad")
        return {name: round(getattr(self, name), 4) for name in names}


@torch.inference_mode()
def evaluate_model(
    model: nn.Module,
    batches: Iterable[Batch],
    num_classes: int,
    sizes: Preprocess,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    bad: Any = None,
    flip: bool = False,
) -> Evaluation:
    """Run `model` over uint8 batches; `dtype` turns autocast on; `bad` counts unreadable pictures.

    With `flip` every answer is averaged with that to the mirrored picture.
    """
    model = model.to(device).eval()
    metrics = accuracy_metrics(num_classes, sync=False).to(device)
    autocast = torch.autocast(torch.device(device).type, dtype) if dtype is not None else nullcontext()
    found: dict[str, list[Tensor]] = {name: [] for name in ("indices", "labels", "losses", "predicted", "confidence")}
    unreadable = 0
    for batch in batches:
        unreadable += len(batch.bad)
        if bad is not None:
            bad.add(batch.bad, "evaluation")
        if not len(batch.labels):
            continue
        labels = batch.labels.to(device)
        with autocast:
            logits = answer(model, batch.images.to(device), sizes, flip)
        metrics.update(logits, labels)
        confidence, predicted = logits.softmax(1).max(1)
        losses = F.cross_entropy(logits, labels, reduction="none")
        for name, value in zip(found, (batch.indices, labels, losses, predicted, confidence), strict=True):
            found[name].append(value.cpu())
    if not found["labels"]:
        raise ValueError("no picture could be evaluated.")
    values = {name: torch.cat(parts) for name, parts in found.items()}
    shares = {name: 100 * float(value) for name, value in metrics.compute().items()}
    pairs = values["labels"] * num_classes + values["predicted"]
    confusion = pairs.bincount(minlength=num_classes**2).view(num_classes, num_classes) if num_classes <= MANY else None
    return Evaluation(
        count=len(values["labels"]),
        loss=float(values["losses"].double().mean()),
        **shares,
        per_class=[
            None if x is None else 100 * x for x in per_class(values["labels"], values["predicted"], num_classes)
        ],
        confusion=confusion,
        bad=unreadable,
        **values,
    )


def answer(model: nn.Module, images: Tensor, sizes: Preprocess, flip: bool = False) -> Tensor:
    """uint8 pictures or clips (B, …), or V views of each (B, V, …) -> logits (B, K); views are averaged, and with
    `flip` each with its mirror image."""
    views = images.shape[1] if images.ndim > (5 if sizes.frames > 1 else 4) else 0
    parts = images.flatten(0, 1).split(len(images)) if views else (images,)
    found = []
    for part in parts:
        pixels = normalize(resize(part.float() / 255, sizes.size).clamp(0, 1), sizes.mean, sizes.std)
        logits = model(pixels).float()
        found.append(average_views(torch.stack((logits, model(pixels.flip(-1)).float()), 1)) if flip else logits)
    logits = torch.cat(found)
    return average_views(logits.unflatten(0, (-1, views))) if views else logits


def evaluate_checkpoint(
    checkpoint: str | Path,
    data: str | Path,
    split: str | None = None,
    size: int | None = None,
    crop_pct: float | None = None,
    batch_size: int = 64,
    workers: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    max_bad: int = 100,
    views: tuple[int, int] = (1, 1),
    flip: bool = False,
    **options: Any,
) -> tuple[Evaluation, Card, Source]:
    """A weights file (saccade's, an authors' release, a run's folder) on a data set, by the papers' protocol.

    Shorter side to size / crop_pct, centre crop; `size` and `crop_pct` default to what the file says. Classes are
    matched by name where both sides have names. A model of clips takes videos, in `views` clips and crops each. With
    `flip` every answer is averaged with that to the mirrored picture.
    """
    model, card = open_model(checkpoint)
    sizes = card.preprocess._replace(size=size or card.preprocess.size, crop_pct=crop_pct or card.preprocess.crop_pct)
    if sizes.frames:
        options |= {"find": find_video_splits, "frames": sizes.frames}
    source = open_split(data, split, card.classes or None, size=sizes.size, **options)
    if len(source.classes) != card.num_classes:
        raise DataError(f"the model tells {card.num_classes} classes apart, the data has {len(source.classes)}.")
    check_labels(source, "evaluation")
    batches = evaluation_batches(source, sizes, batch_size, workers, device, views)
    bad = BadPictures(max_bad)
    return evaluate_model(model, batches, card.num_classes, sizes, device, dtype, bad, flip), card, source
