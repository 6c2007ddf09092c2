"""Evaluation of classifiers: accuracy, calibration, confusion, and per-image losses."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.data.loader import Batch
from saccade.data.open import find_video_splits, open_split
from saccade.data.sources.base import Source, check_labels
from saccade.data.transforms.batch import normalize, resize
from saccade.engine.loaders import UnreadableImages, evaluation_loader
from saccade.engine.tasks.evaluation import EvaluationBatches, check_num_classes, inference_autocast
from saccade.models.card import Card, Preprocess, open_model
from saccade.tasks.classification import accuracy_metrics, per_class_accuracy
from saccade.tasks.video import average_views

MAX_CONFUSION_CLASSES = 1000  # no confusion matrix for more


class Evaluation(NamedTuple):
    """Metrics in percent, and one value per image in the order of evaluation."""

    count: int
    loss: float
    top1: float
    top5: float
    calibration: float  # expected calibration error, 15 bins
    per_class: list[float | None]  # accuracy; None for a class without images
    confusion: Tensor | None  # (K, K): true, predicted
    indices: Tensor  # (N,) of the images in their source
    labels: Tensor  # (N,)
    losses: Tensor  # (N,)
    predicted: Tensor  # (N,)
    confidence: Tensor  # (N,) probability of the predicted class
    bad: int  # images that could not be read

    def summary(self) -> dict[str, Any]:
        """Return the metrics for JSON."""
        names = ("count", "loss", "top1", "top5", "calibration", "bad")
        return {name: round(getattr(self, name), 4) for name in names}


@torch.inference_mode()
def evaluate_classifier(
    model: nn.Module,
    batches: Iterable[Batch],
    num_classes: int,
    preprocess: Preprocess,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    unreadable: UnreadableImages | None = None,
    flip: bool = False,
) -> Evaluation:
    """Evaluate `model` on uint8 batches, with autocast to `dtype`; `flip` averages with the mirrored image."""
    model = model.to(device).eval()
    metrics = accuracy_metrics(num_classes, sync=False).to(device)
    reader = EvaluationBatches(batches, unreadable)
    outputs: list[tuple[Tensor, ...]] = []
    for batch in reader:
        labels = batch.labels.to(device)
        with inference_autocast(device, dtype):
            logits = predict_logits(model, batch.images.to(device), preprocess, flip)
        metrics.update(logits, labels)
        confidence, predicted = logits.softmax(1).max(1)
        losses = F.cross_entropy(logits, labels, reduction="none")
        outputs.append(tuple(x.cpu() for x in (batch.indices, labels, losses, predicted, confidence)))
    indices, labels, losses, predicted, confidence = (torch.cat(values) for values in zip(*outputs, strict=True))
    percent = {name: 100 * float(value) for name, value in metrics.compute().items()}
    confusion = None
    if num_classes <= MAX_CONFUSION_CLASSES:
        pairs = labels * num_classes + predicted
        confusion = pairs.bincount(minlength=num_classes**2).view(num_classes, num_classes)
    return Evaluation(
        count=len(labels),
        loss=float(losses.double().mean()),
        top1=percent["top1"],
        top5=percent["top5"],
        calibration=percent["calibration"],
        per_class=[None if x is None else 100 * x for x in per_class_accuracy(labels, predicted, num_classes)],
        confusion=confusion,
        indices=indices,
        labels=labels,
        losses=losses,
        predicted=predicted,
        confidence=confidence,
        bad=reader.num_unreadable,
    )


def predict_logits(model: nn.Module, images: Tensor, preprocess: Preprocess, flip: bool = False) -> Tensor:
    """uint8 images or clips (B, …), or V views of each (B, V, …) -> logits (B, K).

    The probabilities of views, and with `flip` of mirrored inputs, are averaged.
    """
    views = images.shape[1] if images.ndim > (5 if preprocess.frames > 1 else 4) else 0
    chunks = images.flatten(0, 1).split(len(images)) if views else (images,)
    outputs = []
    for chunk in chunks:
        pixels = normalize(resize(chunk.float() / 255, preprocess.size).clamp(0, 1), preprocess.mean, preprocess.std)
        logits = model(pixels).float()
        if flip:
            logits = average_views(torch.stack((logits, model(pixels.flip(-1)).float()), 1))
        outputs.append(logits)
    logits = torch.cat(outputs)
    return average_views(logits.unflatten(0, (-1, views))) if views else logits


def evaluate_classifier_checkpoint(
    checkpoint: str | Path,
    data: str | Path,
    split: str | None = None,
    size: int | None = None,
    crop_pct: float | None = None,
    batch_size: int = 64,
    workers: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    max_unreadable: int = 100,
    views: tuple[int, int] = (1, 1),
    flip: bool = False,
    **options: Any,
) -> tuple[Evaluation, Card, Source]:
    """Evaluate a weights file (saccade's or the authors') or a run folder on a data set, by the papers' protocol.

    Images are resized to a shorter side of size / crop_pct and centre-cropped; both default to the file's values.
    Classes are matched by name if both sides have names. Video models get `views` temporal clips and spatial crops.
    """
    model, card = open_model(checkpoint)
    default = card.preprocess
    preprocess = default._replace(size=size or default.size, crop_pct=crop_pct or default.crop_pct)
    if preprocess.frames:
        options |= {"find": find_video_splits, "frames": preprocess.frames}
    source = open_split(data, split, card.classes or None, size=preprocess.size, **options)
    check_num_classes(card, source.classes)
    check_labels(source, "evaluation")
    batches = evaluation_loader(source, preprocess, batch_size, workers, device, views)
    unreadable = UnreadableImages(max_unreadable)
    evaluation = evaluate_classifier(model, batches, card.num_classes, preprocess, device, dtype, unreadable, flip)
    return evaluation, card, source
