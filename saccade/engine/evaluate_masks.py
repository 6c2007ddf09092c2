"""What a trained segmenter is worth: IoU of every class, accuracies, and its best and worst pictures."""

from collections.abc import Iterable
from contextlib import nullcontext
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
from saccade.engine.feed import BadPictures
from saccade.models.card import Card, Preprocess
from saccade.tasks.inference import WHOLE, Inference, infer
from saccade.tasks.open import open_task_model
from saccade.tasks.segmentation import IGNORE, Scores, segmentation_metric


class MaskEvaluation(NamedTuple):
    """Percentages, and per picture what the report looks for."""

    count: int
    loss: float  # mean cross-entropy of a labelled pixel
    scores: Scores
    confusion: Tensor  # (K, K) pixels: true, predicted
    indices: Tensor  # (N,) of the pictures in their source
    hits: Tensor  # (N,) share of their labelled pixels that are right
    bad: int

    def summary(self) -> dict[str, Any]:
        """The numbers, for JSON."""
        shares = {name: round(100 * getattr(self.scores, name), 4) for name in ("miou", "macc", "aacc")}
        return {"count": self.count, "loss": round(self.loss, 4), **shares, "bad": self.bad}


@torch.inference_mode()
def evaluate_segmenter(
    model: nn.Module,
    batches: Iterable[Batch],
    classes: list[str],
    sizes: Preprocess,
    shorter: int | None = None,
    how: Inference = WHOLE,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    bad: Any = None,
) -> MaskEvaluation:
    """Run `model` over uint8 pictures and masks; `shorter` is the side at which it looks at them, None their own."""
    model = model.to(device).eval()
    metric = segmentation_metric(len(classes), sync=False).to(device)
    autocast = torch.autocast(torch.device(device).type, dtype) if dtype is not None else nullcontext()
    found: dict[str, list[Tensor]] = {"indices": [], "hits": []}
    loss, pixels, unreadable = torch.zeros((), dtype=torch.float64), 0, 0
    for batch in batches:
        unreadable += len(batch.bad)
        if bad is not None:
            bad.add(batch.bad, "evaluation")
        if not len(batch.labels):
            continue
        masks = batch.labels.to(device).long()
        images = look_at(batch.images.to(device), sizes, shorter)
        with autocast:
            shares = answer(model, images, masks.shape[1:], how, classes)
        labels = shares.argmax(1)
        metric.update(labels, masks)
        known = masks != IGNORE
        found["hits"].append((((labels == masks) & known).sum((1, 2)) / known.sum((1, 2)).clamp(min=1)).cpu())
        found["indices"].append(batch.indices)
        nll = F.nll_loss(shares.clamp(min=1e-9).log(), masks, ignore_index=IGNORE, reduction="sum")
        loss, pixels = loss + nll.double().cpu(), pixels + int(known.sum())
    if not found["indices"]:
        raise ValueError("no picture could be evaluated.")
    confusion = metric.compute().cpu()
    indices, hits = torch.cat(found["indices"]), torch.cat(found["hits"])
    average = float(loss / max(pixels, 1))
    return MaskEvaluation(len(indices), average, Scores.of(confusion), confusion, indices, hits, unreadable)


def look_at(images: Tensor, sizes: Preprocess, shorter: int | None = None) -> Tensor:
    """uint8 pictures (B, 3, H, W) -> normalised pictures, the shorter side as asked for."""
    pixels = images.float() / 255
    height, width = pixels.shape[2:]
    if shorter is not None and shorter != min(height, width):
        factor = shorter / min(height, width)
        pixels = F.interpolate(pixels, (round(height * factor), round(width * factor)), mode="bilinear", antialias=True)
    return normalize(pixels, sizes.mean, sizes.std)


def answer(
    model: nn.Module, images: Tensor, size: tuple[int, ...] | torch.Size, how: Inference, classes: list[str]
) -> Tensor:
    """Normalised pictures -> probabilities (B, K, *size), at the size of the masks or the photo."""
    shares = infer(model, images, how, flipped_classes(classes))
    if shares.shape[2:] == torch.Size(size):
        return shares
    return F.interpolate(shares, tuple(size), mode="bilinear", align_corners=False)


def evaluate_segmenter_checkpoint(
    checkpoint: str | Path,
    data: str | Path,
    split: str | None = None,
    shorter: int | None = None,
    how: Inference = WHOLE,
    workers: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    max_bad: int = 100,
    **options: Any,
) -> tuple[MaskEvaluation, Card, MaskSource]:
    """A weights file or a run's folder on a data set; pictures one by one, each in its own size and aspect."""
    model, card = open_task_model(checkpoint)
    source = open_mask_split(data, split, size=card.preprocess.size, **options)
    if len(source.classes) != card.num_classes:
        raise DataError(f"the model tells {card.num_classes} classes apart, the data has {len(source.classes)}.")
    if card.classes and source.classes != card.classes:
        raise DataError(f"the model was trained on other classes: {', '.join(card.classes[:4])}, ….")
    check_masks(source, "evaluation")
    batches = EvalLoader(source, EvalPair(), 1, workers, pin_memory=device.startswith("cuda"), load=load_pair)
    bad = BadPictures(max_bad)
    shorter = shorter or card.shorter
    found = evaluate_segmenter(model, batches, source.classes, card.preprocess, shorter, how, device, dtype, bad)
    return found, card, source
