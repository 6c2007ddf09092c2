"""Evaluation of segmenters: IoU per class, accuracies, and per-image pixel accuracy."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.data.loader import Batch, EvalLoader
from saccade.data.open import open_mask_split
from saccade.data.sources.base import DataError
from saccade.data.sources.class_names import flipped_classes
from saccade.data.sources.masks import MaskSource, check_masks, load_pair
from saccade.data.transforms.batch import normalize
from saccade.data.transforms.mask import EvalPair
from saccade.engine.loaders import UnreadableImages
from saccade.engine.tasks.evaluation import EvaluationBatches, check_num_classes, inference_autocast
from saccade.models.card import Card, Preprocess
from saccade.tasks.open import open_task_model
from saccade.tasks.segmentation import IGNORE_INDEX, SegmentationScores, segmentation_metric
from saccade.tasks.segmentation_inference import WHOLE_IMAGE, InferenceOptions, predict_probabilities


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
            probabilities = predict_batch(model, images, masks.shape[1:], inference, classes)
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


def preprocess_images(images: Tensor, preprocess: Preprocess, shorter: int | None = None) -> Tensor:
    """uint8 images (B, 3, H, W) -> normalised images, resized to the shorter side if it is given."""
    pixels = images.float() / 255
    height, width = pixels.shape[2:]
    if shorter is not None and shorter != min(height, width):
        factor = shorter / min(height, width)
        pixels = F.interpolate(pixels, (round(height * factor), round(width * factor)), mode="bilinear", antialias=True)
    return normalize(pixels, preprocess.mean, preprocess.std)


def predict_batch(
    model: nn.Module,
    images: Tensor,
    size: tuple[int, ...] | torch.Size,
    inference: InferenceOptions,
    classes: list[str],
) -> Tensor:
    """Normalised images -> class probabilities (B, K, *size), at the size of the masks."""
    probabilities = predict_probabilities(model, images, inference, flipped_classes(classes))
    if probabilities.shape[2:] == torch.Size(size):
        return probabilities
    return F.interpolate(probabilities, tuple(size), mode="bilinear", align_corners=False)


def evaluate_segmenter_checkpoint(
    checkpoint: str | Path,
    data: str | Path,
    split: str | None = None,
    shorter: int | None = None,
    inference: InferenceOptions = WHOLE_IMAGE,
    workers: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    max_unreadable: int = 100,
    **options: Any,
) -> tuple[MaskEvaluation, Card, MaskSource]:
    """Evaluate a weights file or a run folder on a data set, one image at a time in its own aspect ratio."""
    model, card = open_task_model(checkpoint)
    source = open_mask_split(data, split, size=card.preprocess.size, **options)
    check_num_classes(card, source.classes)
    if card.classes and source.classes != card.classes:
        raise DataError(
            f"the model was trained on other classes: expected {', '.join(card.classes[:4])}, …, "
            f"got {', '.join(source.classes[:4])}, …."
        )
    check_masks(source, "evaluation")
    batches = EvalLoader(source, EvalPair(), 1, workers, pin_memory=device.startswith("cuda"), load=load_pair)
    unreadable = UnreadableImages(max_unreadable)
    shorter = shorter or card.shorter
    evaluation = evaluate_segmenter(
        model, batches, source.classes, card.preprocess, shorter, inference, device, dtype, unreadable
    )
    return evaluation, card, source
