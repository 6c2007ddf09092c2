"""Evaluation of segmenters: IoU per class, accuracies, and per-image pixel accuracy."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.data.loader import Batch
from saccade.engine.loaders import UnreadableImages
from saccade.engine.tasks.evaluation import EvaluationBatches
from saccade.models.card import Preprocess
from saccade.tasks.predict import inference_autocast, preprocess_images, segment_batch
from saccade.tasks.segmentation import IGNORE_INDEX, SegmentationScores, segmentation_metric
from saccade.tasks.segmentation_inference import WHOLE_IMAGE, InferenceOptions


class MaskEvaluation(NamedTuple):
    """Metrics as fractions, and one value per image."""

    count: int
    loss: float  # mean cross-entropy per labelled pixel
    scores: SegmentationScores
    confusion: Tensor  # (K, K) pixels: true, predicted
    indices: Tensor  # (N,) of the images in their source
    accuracy: Tensor  # (N,) fraction of correct labelled pixels
    bad: int  # images that could not be read

    def summary(self) -> dict[str, Any]:
        """Return the metrics in percent, for JSON."""
        percent = {name: round(100 * getattr(self.scores, name), 4) for name in ("miou", "macc", "aacc")}
        return {"count": self.count, "loss": round(self.loss, 4), **percent, "bad": self.bad}


@torch.inference_mode()
def evaluate_segmenter(
    model: nn.Module,
    batches: Iterable[Batch],
    classes: list[str],
    preprocess: Preprocess,
    shorter: int | None = None,
    inference: InferenceOptions = WHOLE_IMAGE,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    unreadable: UnreadableImages | None = None,
) -> MaskEvaluation:
    """Evaluate `model` on uint8 images and masks; `shorter` is the shorter side of its inputs, None for no resizing."""
    model = model.to(device).eval()
    metric = segmentation_metric(len(classes), sync=False).to(device)
    reader = EvaluationBatches(batches, unreadable)
    indices: list[Tensor] = []
    accuracy: list[Tensor] = []
    loss, pixels = torch.zeros((), dtype=torch.float64), 0
    for batch in reader:
        masks = batch.labels.to(device).long()
        images = preprocess_images(batch.images.to(device), preprocess, shorter)
        with inference_autocast(device, dtype):
            probabilities = segment_batch(model, images, masks.shape[1:], inference, classes)
        labels = probabilities.argmax(1)
        metric.update(labels, masks)
        valid = masks != IGNORE_INDEX
        accuracy.append((((labels == masks) & valid).sum((1, 2)) / valid.sum((1, 2)).clamp(min=1)).cpu())
        indices.append(batch.indices)
        nll = F.nll_loss(probabilities.clamp(min=1e-9).log(), masks, ignore_index=IGNORE_INDEX, reduction="sum")
        loss, pixels = loss + nll.double().cpu(), pixels + int(valid.sum())
    confusion = metric.compute().cpu()
    return MaskEvaluation(
        count=sum(map(len, indices)),
        loss=float(loss / max(pixels, 1)),
        scores=SegmentationScores.from_confusion(confusion),
        confusion=confusion,
        indices=torch.cat(indices),
        accuracy=torch.cat(accuracy),
        bad=reader.num_unreadable,
    )
