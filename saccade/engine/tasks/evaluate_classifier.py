"""Evaluation of classifiers: accuracy, calibration, confusion, and per-image losses."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.data.loader import Batch
from saccade.engine.loaders import UnreadableImages
from saccade.engine.tasks.evaluation import EvaluationBatches
from saccade.models.card import Preprocess
from saccade.tasks.classification import accuracy_metrics, per_class_accuracy
from saccade.tasks.predict import inference_autocast, predict_logits

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
