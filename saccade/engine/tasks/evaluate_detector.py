"""Evaluation of detectors: average precision of boxes and masks, and per-image detection quality."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchvision.ops import box_iou

from saccade.data.loader import ObjectBatch
from saccade.data.sources.objects import ObjectSource
from saccade.engine.loaders import UnreadableImages
from saccade.engine.tasks.evaluation import EvaluationBatches
from saccade.tasks.coco_metric import CocoMetric
from saccade.tasks.predict import detect_objects, inference_autocast

COCO_METRICS = {"ap": "AP", "ap50": "AP50", "ap75": "AP75"}  # of boxes and of masks, with display names
COCO_METRICS |= {"ap_small": "AP small", "ap_medium": "AP medium", "ap_large": "AP large", "ar": "AR"}
SCORE_THRESHOLD = 0.5  # of detections in the per-image quality


class ObjectEvaluation(NamedTuple):
    """Metrics in percent, and one value per image."""

    metrics: dict[str, float]  # box_ap, box_ap50, …, mask_ap, …; without entries that have no objects
    per_class: list[float | None]  # box AP; None for a class without objects
    indices: Tensor  # (N,) of the images in their source
    quality: Tensor  # (N,) detected objects / (objects + false detections)
    bad: int  # images that could not be read
    coco: CocoMetric  # has all detections, for `write`

    @property
    def count(self) -> int:
        return len(self.indices)

    def summary(self) -> dict[str, Any]:
        """Return the metrics for JSON."""
        return {"count": self.count, **{key: round(value, 4) for key, value in self.metrics.items()}, "bad": self.bad}


@torch.inference_mode()
def evaluate_detector(
    model: nn.Module,
    batches: Iterable[ObjectBatch],
    source: ObjectSource,
    coco: CocoMetric,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    unreadable: UnreadableImages | None = None,
    size: int | None = None,
) -> ObjectEvaluation:
    """Evaluate `model` on uint8 images, with autocast to `dtype`; `size` is the shorter side of its inputs."""
    model = model.to(device).eval()
    coco.reset()
    reader = EvaluationBatches(batches, unreadable)
    indices: list[Tensor] = []
    quality: list[float] = []
    for batch in reader:
        with inference_autocast(device, dtype):
            predictions = detect_objects(model, batch.images, device, size)
        coco.update(predictions, source.image_ids[batch.indices.numpy()].tolist())
        quality += [
            detection_quality(prediction["boxes"][prediction["scores"] >= SCORE_THRESHOLD].cpu(), target["boxes"])
            for prediction, target in zip(predictions, batch.labels, strict=True)
        ]
        indices.append(batch.indices)
    metrics = {"box_ap": 0.0}  # also for data without objects
    metrics |= {name: 100 * value for name, value in coco.compute().items()}
    per_class = [None if value is None else 100 * value for value in coco.per_class["box"]]
    return ObjectEvaluation(metrics, per_class, torch.cat(indices), torch.tensor(quality), reader.num_unreadable, coco)


def detection_quality(boxes: Tensor, true: Tensor) -> float:
    """Return detected objects / (objects + false boxes), where a detection overlaps by IoU 0.5; ignores classes."""
    if not len(boxes) or not len(true):
        return float(len(boxes) == len(true))
    overlap = box_iou(true, boxes) >= 0.5
    detected, false = int(overlap.any(1).sum()), int((~overlap.any(0)).sum())
    return detected / (len(true) + false)


def coco_metric(model: nn.Module, source: ObjectSource, max_detections: int) -> CocoMetric:
    """Return the metric of boxes, and of masks if both the model and the data have them."""
    heads: Any = getattr(model, "roi_heads", None)  # region-based detectors only
    masks = heads is not None and heads.has_mask() and source.has_masks
    return CocoMetric(source.ground_truth(), source.category_ids, masks, max_detections)
