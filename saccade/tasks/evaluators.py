"""Metrics of each task over batches: of the validation during training and of `saccade.evaluate`."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import box_iou

from saccade._extras import require
from saccade.data.loader import Batch, ObjectBatch, UnreadableImages
from saccade.data.sources.objects import ObjectSource
from saccade.models.card import Preprocess
from saccade.tasks.classification import accuracy_metrics, label_metrics, per_class_accuracy
from saccade.tasks.coco_metric import CocoMetric
from saccade.tasks.distillation import Teacher, alignment_loss, final_features
from saccade.tasks.losses import label_loss
from saccade.tasks.predict import (
    detect_objects,
    inference_autocast,
    normalize_pixels,
    predict_logits,
    preprocess_images,
    segment_batch,
)
from saccade.tasks.segmentation import IGNORE_INDEX, SegmentationScores, segmentation_metric
from saccade.tasks.segmentation_inference import WHOLE_IMAGE, InferenceOptions

MAX_CONFUSION_CLASSES = 1000  # no confusion matrix for more
SCORE_THRESHOLD = 0.5  # of detections in the per-image quality


class Evaluation(NamedTuple):
    """The result of an evaluation."""

    metrics: dict[str, float]  # in percent, except for the loss
    per_class: list[float | None]  # accuracy, AP, IoU or box AP in percent; None for a class without samples
    confusion: Tensor | None  # (K, K) images or pixels: true, predicted
    images: dict[str, Tensor]  # one value (N, …) per image, in the order of evaluation; `indices` in the source
    bad: int = 0  # images that could not be read

    def summary(self) -> dict[str, Any]:
        """Return the metrics for JSON."""
        metrics = {name: round(value, 4) for name, value in self.metrics.items()}
        return {"count": len(self.images["indices"]), **metrics, "bad": self.bad}


class Evaluator(ABC):
    """Collects the predictions of a model: `reset`, `update` with every batch, `compute`; or `evaluate` does all.

    With `sync`, metrics are those of all processes; values per image remain those of this process.
    """

    columns: ClassVar[tuple[str, ...]] = ("indices", "quality")  # values per image

    def __init__(self, sync: bool = False, **metrics: Any):
        mean_loss = require("torchmetrics", "train").MeanMetric(sync_on_compute=sync)
        self.sync = sync
        self.metrics: Any = nn.ModuleDict(metrics | {"loss": mean_loss})  # torchmetrics, to move them to a device
        self.images: list[dict[str, Tensor]] = []  # of every batch

    def reset(self, device: torch.device | str) -> None:
        self.images = []
        for metric in self.metrics.to(device).values():
            metric.reset()

    @abstractmethod
    def update(self, model: nn.Module, batch: Any) -> None:
        """Add the predictions for a batch with at least one image."""

    @abstractmethod
    def compute(self) -> Evaluation: ...

    @torch.inference_mode()
    def evaluate(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        unreadable: UnreadableImages | None = None,
    ) -> Evaluation:
        """Evaluate the model on all batches, with autocast to `dtype`; raise at the limit of `unreadable`."""
        model, bad = model.to(device).eval(), 0
        self.reset(device)
        for batch in batches:
            bad += len(batch.bad)
            if unreadable is not None:
                unreadable.add(batch.bad, "evaluation")
            if len(batch.labels):
                with inference_autocast(device, dtype):
                    self.update(model, batch)
        if not self.images:
            raise ValueError("no image could be evaluated.")
        return self.compute()._replace(bad=bad)

    def mean_loss(self) -> float:
        return float(self.metrics["loss"].compute())

    def image_values(self) -> dict[str, Tensor]:
        """Return the values per image of all batches, on the CPU; a process may have no image."""
        empty = torch.empty(0, dtype=torch.long)
        return {name: torch.cat([empty, *(batch[name].cpu() for batch in self.images)]) for name in self.columns}


class ClassEvaluator(Evaluator):
    """Accuracy, calibration error (15 bins), confusion; per image: labels, losses, predicted, confidence."""

    columns = ("indices", "labels", "losses", "predicted", "confidence")

    def __init__(self, num_classes: int, preprocess: Preprocess, flip: bool = False, sync: bool = False):
        super().__init__(sync, accuracy=accuracy_metrics(num_classes, sync))
        self.num_classes, self.preprocess, self.flip = num_classes, preprocess, flip

    def update(self, model: nn.Module, batch: Batch) -> None:
        device = self.metrics["loss"].device
        labels = batch.labels.to(device)
        logits = predict_logits(model, batch.images.to(device), self.preprocess, self.flip).float()
        self.metrics["accuracy"].update(logits, labels)
        losses = F.cross_entropy(logits, labels, reduction="none")
        self.metrics["loss"].update(losses)
        confidence, predicted = logits.softmax(1).max(1)
        values = (batch.indices, labels, losses, predicted, confidence)
        self.images.append(dict(zip(self.columns, values, strict=True)))

    def compute(self) -> Evaluation:
        images, size = self.image_values(), self.num_classes
        percent = {name: 100 * float(value) for name, value in self.metrics["accuracy"].compute().items()}
        accuracy, confusion = per_class_accuracy(images["labels"], images["predicted"], size), None
        if size <= MAX_CONFUSION_CLASSES:
            confusion = (images["labels"] * size + images["predicted"]).bincount(minlength=size**2).view(size, size)
        names = ("top1", "top5", "calibration")
        metrics = {"loss": self.mean_loss()} | {name: percent[name] for name in names}
        return Evaluation(metrics, [None if x is None else 100 * x for x in accuracy], confusion, images)


class LabelEvaluator(Evaluator):
    """Multi-label: mean AP and F1 (threshold 0.5) of the classes that occur, AP per class.

    Per image: quality, the negative loss; scores (K,), the probabilities.
    """

    columns = ("indices", "quality", "scores")

    def __init__(self, num_classes: int, preprocess: Preprocess, flip: bool = False, sync: bool = False):
        super().__init__(sync, labels=label_metrics(num_classes, sync))
        self.preprocess, self.flip = preprocess, flip

    def update(self, model: nn.Module, batch: Batch) -> None:
        device = self.metrics["loss"].device
        labels = batch.labels.to(device)
        logits = predict_logits(model, batch.images.to(device), self.preprocess, self.flip, multi_label=True).float()
        scores, losses = logits.sigmoid(), label_loss(logits, labels).mean(1)
        self.metrics["labels"].update(scores, labels.int())
        self.metrics["loss"].update(losses)
        values = (batch.indices, -losses, scores)
        self.images.append(dict(zip(self.columns, values, strict=True)))

    def compute(self) -> Evaluation:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="No positive samples")  # those classes are left out below
            values = self.metrics["labels"].compute()
        occurs = values["counts"][:, -1] > 0
        metrics = {"loss": self.mean_loss()}
        metrics |= {name: 100 * float(values[key][occurs].mean()) for name, key in (("map", "ap"), ("f1", "f1"))}
        pairs = zip(values["ap"].tolist(), occurs.tolist(), strict=True)
        per_class = [100 * value if present else None for value, present in pairs]
        return Evaluation(metrics, per_class, None, self.image_values())


class AlignmentEvaluator(Evaluator):
    """Mean cosine similarity with the teacher's final token, and images with its most probable class."""

    columns = ("indices",)

    def __init__(self, teacher: Teacher, preprocess: Preprocess, sync: bool = False):
        super().__init__(sync, agreement=require("torchmetrics", "train").MeanMetric(sync_on_compute=sync))
        self.teacher, self.preprocess = teacher, preprocess

    def update(self, model: nn.Module, batch: Batch) -> None:
        images = normalize_pixels(batch.images.to(self.metrics["loss"].device), self.preprocess)
        ours, theirs = final_features(model, images), self.teacher.features(images)
        owners: Any = ((model, ours), (self.teacher.model, theirs))
        classes = [owner.get_classifier()(tokens).argmax(1) for owner, tokens in owners]
        self.metrics["loss"].update(alignment_loss(ours, theirs), len(images))
        self.metrics["agreement"].update((classes[0] == classes[1]).float())
        self.images.append({"indices": batch.indices})

    def compute(self) -> Evaluation:
        loss, agreement = self.mean_loss(), float(self.metrics["agreement"].compute())
        metrics = {"loss": loss, "cosine": 100 * (1 - loss), "agreement": 100 * agreement}
        return Evaluation(metrics, [], None, self.image_values())


class MaskEvaluator(Evaluator):
    """IoU per class and accuracies; per image: quality, the fraction of correct labelled pixels.

    `shorter` is the shorter side of the model's inputs, None for no resizing.
    """

    def __init__(
        self,
        classes: list[str],
        preprocess: Preprocess,
        shorter: int | None = None,
        inference: InferenceOptions = WHOLE_IMAGE,
        sync: bool = False,
    ):
        super().__init__(sync, confusion=segmentation_metric(len(classes), sync=sync))
        self.classes, self.preprocess, self.shorter, self.inference = classes, preprocess, shorter, inference

    def predict(self, model: nn.Module, images: Tensor, size: tuple[int, ...] | torch.Size) -> Tensor:
        """uint8 images -> class probabilities (B, K, *size)."""
        inputs = preprocess_images(images, self.preprocess, self.shorter)
        return segment_batch(model, inputs, size, self.inference, self.classes)

    def update(self, model: nn.Module, batch: Batch) -> None:
        device = self.metrics["loss"].device
        masks = batch.labels.to(device).long()
        probabilities = self.predict(model, batch.images.to(device), masks.shape[1:])
        labels, valid = probabilities.argmax(1), masks != IGNORE_INDEX
        self.metrics["confusion"].update(labels, masks)
        accuracy = ((labels == masks) & valid).sum((1, 2)) / valid.sum((1, 2)).clamp(min=1)
        losses = F.nll_loss(probabilities.clamp(min=1e-9).log(), masks, ignore_index=IGNORE_INDEX, reduction="none")
        self.metrics["loss"].update(losses, valid.float())  # mean over labelled pixels
        self.images.append({"indices": batch.indices, "quality": accuracy})

    def compute(self) -> Evaluation:
        confusion = self.metrics["confusion"].compute().cpu()
        scores = SegmentationScores.from_confusion(confusion)
        metrics = {"loss": self.mean_loss()}
        metrics |= {name: 100 * getattr(scores, name) for name in ("miou", "macc", "aacc")}
        iou = [None if value is None else 100 * value for value in scores.iou]
        return Evaluation(metrics, iou, confusion, self.image_values())


class ObjectEvaluator(Evaluator):
    """Average precision of boxes, and of masks if model and data have them; per image: `detection_quality`.

    `size` is the shorter side of the model's inputs. With `sync`, metrics by object size are left out.
    """

    def __init__(
        self, source: ObjectSource, masks: bool, max_detections: int = 100, size: int | None = None, sync: bool = False
    ):
        super().__init__(sync)
        self.source, self.size = source, size
        self.coco = CocoMetric(source.ground_truth(), source.category_ids, masks, max_detections)

    def reset(self, device: torch.device | str) -> None:
        super().reset(device)
        self.coco.reset()

    def update(self, model: nn.Module, batch: ObjectBatch) -> None:
        predictions = detect_objects(model, batch.images, self.metrics["loss"].device, self.size)
        self.coco.update(predictions, self.source.image_ids[batch.indices.cpu().numpy()].tolist())
        quality = [
            detection_quality(prediction["boxes"][prediction["scores"] >= SCORE_THRESHOLD].cpu(), target["boxes"].cpu())
            for prediction, target in zip(predictions, batch.labels, strict=True)
        ]
        self.images.append({"indices": batch.indices, "quality": torch.tensor(quality)})

    def compute(self) -> Evaluation:
        if self.sync:
            self.coco.gather()
        values = self.coco.compute(by_size=not self.sync)
        metrics = {"box_ap": 0.0} | {name: 100 * value for name, value in values.items()}  # also without objects
        per_class = [None if value is None else 100 * value for value in self.coco.per_class["box"]]
        return Evaluation(metrics, per_class, None, self.image_values())


def detection_quality(boxes: Tensor, true: Tensor) -> float:
    """Return detected objects / (objects + false boxes), where a detection overlaps by IoU 0.5; ignores classes."""
    if not len(boxes) or not len(true):
        return float(len(boxes) == len(true))
    overlap = box_iou(true, boxes) >= 0.5
    detected, false = int(overlap.any(1).sum()), int((~overlap.any(0)).sum())
    return detected / (len(true) + false)


def has_masks(model: nn.Module, source: ObjectSource) -> bool:
    """Whether both model and data have instance masks."""
    heads: Any = getattr(model, "roi_heads", None)  # region-based detectors only
    return heads is not None and heads.has_mask() and source.has_masks
