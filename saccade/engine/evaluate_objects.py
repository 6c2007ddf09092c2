"""What a trained detector is worth: average precision of boxes and masks, and how well it does picture by picture."""

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchvision.ops import box_iou

from saccade.data.loader import ObjectBatch, ObjectEvalLoader
from saccade.data.open import open_object_split
from saccade.data.sources.base import DataError
from saccade.data.sources.objects import ObjectSource
from saccade.engine.feed import BadPictures
from saccade.models.card import Card
from saccade.tasks.coco import CocoMetric
from saccade.tasks.open import open_task_model

FIGURES = {"ap": "AP", "ap50": "AP50", "ap75": "AP75"}  # of boxes and of masks, and their headings
FIGURES |= {"ap_small": "AP small", "ap_medium": "AP medium", "ap_large": "AP large", "ar": "AR"}
SURE = 0.5  # score from which on a detection counts for the look at single pictures


class ObjectEvaluation(NamedTuple):
    """Percentages, and per picture what the report looks for."""

    figures: dict[str, float]  # box_ap, box_ap50, …, mask_ap, …; what has no objects to find is left out
    per_class: list[float | None]  # box AP
    indices: Tensor  # (N,) of the pictures in their source
    hits: Tensor  # (N,) objects found, over objects and false detections: 1 is perfect
    bad: int
    metric: CocoMetric  # holds all detections, for `write`

    @property
    def count(self) -> int:
        return len(self.indices)

    def summary(self) -> dict[str, Any]:
        """The numbers, for JSON."""
        return {"count": self.count, **{key: round(value, 4) for key, value in self.figures.items()}, "bad": self.bad}


@torch.inference_mode()
def evaluate_detector(
    model: nn.Module,
    batches: Iterable[ObjectBatch],
    source: ObjectSource,
    metric: CocoMetric,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    bad: Any = None,
) -> ObjectEvaluation:
    """Run `model` over uint8 pictures; `dtype` turns autocast on; `bad` counts unreadable pictures."""
    model = model.to(device).eval()
    metric.reset()
    autocast = torch.autocast(torch.device(device).type, dtype) if dtype is not None else nullcontext()
    indices: list[Tensor] = []
    hits: list[float] = []
    unreadable = 0
    for batch in batches:
        unreadable += len(batch.bad)
        if bad is not None:
            bad.add(batch.bad, "evaluation")
        if not batch.images:
            continue
        with autocast:
            found = model([image.to(device).float() / 255 for image in batch.images])
        metric.update(found, source.image_ids[batch.indices.numpy()].tolist())
        hits += [
            share_found(one["boxes"][one["scores"] >= SURE].cpu(), true["boxes"])
            for one, true in zip(found, batch.labels, strict=True)
        ]
        indices.append(batch.indices)
    if not indices:
        raise ValueError("no picture could be evaluated.")
    figures = {"box_ap": 0.0}  # also where there is nothing to find
    figures |= {name: 100 * value for name, value in metric.compute().items()}
    per_class = [None if share is None else 100 * share for share in metric.per_class["box"]]
    return ObjectEvaluation(figures, per_class, torch.cat(indices), torch.tensor(hits), unreadable, metric)


def share_found(boxes: Tensor, true: Tensor) -> float:
    """Objects with a box that overlaps them by half, over objects and boxes without one; classes do not matter here."""
    if not len(boxes) or not len(true):
        return float(len(boxes) == len(true))
    overlap = box_iou(true, boxes) >= 0.5
    found, wrong = int(overlap.any(1).sum()), int((~overlap.any(0)).sum())
    return found / (len(true) + wrong)


def evaluate_detector_checkpoint(
    checkpoint: str | Path,
    data: str | Path,
    split: str | None = None,
    size: int | None = None,
    batch_size: int = 8,
    workers: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    max_bad: int = 100,
    max_detections: int = 100,
    **options: Any,
) -> tuple[ObjectEvaluation, Card, ObjectSource]:
    """A weights file or a run's folder on a data set; `size` is the shorter side at which it looks at pictures."""
    model, card = open_task_model(checkpoint)
    if size is not None:
        model.transform.min_size = (size,)
    source = open_object_split(data, split, card.classes or None, size=card.preprocess.size, **options)
    if len(source.classes) != card.num_classes:
        raise DataError(f"the model tells {card.num_classes} classes apart, the data has {len(source.classes)}.")
    batches = ObjectEvalLoader(source, batch_size, workers, pin_memory=device.startswith("cuda"))
    metric = metric_for(model, source, max_detections)
    return evaluate_detector(model, batches, source, metric, device, dtype, BadPictures(max_bad)), card, source


def metric_for(model: nn.Module, source: ObjectSource, max_detections: int) -> CocoMetric:
    """Of boxes, and of masks where both the model and the data have them."""
    masks = gives_masks(model) and source.has_masks
    return CocoMetric(source.ground_truth(), source.category_ids, masks, max_detections)


def gives_masks(model: nn.Module) -> bool:
    heads = getattr(model, "roi_heads", None)
    return heads is not None and heads.has_mask()
