"""Image classification: build a classifier, loss, metrics."""

from typing import Any

import torch
from torch import Tensor, nn

from saccade._extras import require
from saccade.models.checkpoint import load_checkpoint
from saccade.models.registry import create_model
from saccade.weights.read import CheckpointError, read_state_dict


def build_classifier(
    name: str, num_classes: int, checkpoint: str | None = None, pretrained: bool = False, **kwargs: Any
) -> nn.Module:
    """A model by name with `num_classes` outputs. A checkpoint's classifier of another size is replaced."""
    if checkpoint is None:
        return create_model(name, pretrained, num_classes=num_classes, **kwargs)
    state_dict = read_state_dict(checkpoint)
    model = create_model(name, num_classes=num_classes, **kwargs)
    try:
        load_checkpoint(model, state_dict)
    except CheckpointError:
        classes = count_checkpoint_classes(state_dict, model)
        if classes in (None, num_classes):
            raise
        model = create_model(name, num_classes=classes, **kwargs)
        load_checkpoint(model, state_dict)
        model.reset_classifier(num_classes)  # type: ignore[operator] # timm's method, nn.Module does not declare it
    return model


def count_checkpoint_classes(state_dict: dict[str, Tensor], model: nn.Module) -> int | None:
    """Number of classes of a checkpoint's classifier, None without a classifier under one of timm's usual names."""
    names = (model.pretrained_cfg["classifier"], "head.fc", "head", "fc", "classifier")  # type: ignore[index] # timm's
    weights = [state_dict[f"{name}.weight"] for name in names if f"{name}.weight" in state_dict]
    return weights[0].shape[0] if weights else None


def accuracy_metrics(num_classes: int, sync: bool = True) -> Any:
    """torchmetrics of logits (B, K) and labels (B,), from 0 to 1; `sync` reduces over all processes."""
    tm = require("torchmetrics", "train")
    common = {"num_classes": num_classes, "validate_args": False, "sync_on_compute": sync}
    return tm.MetricCollection(
        {
            "top1": tm.classification.MulticlassAccuracy(average="micro", **common),
            "top5": tm.classification.MulticlassAccuracy(average="micro", top_k=min(5, num_classes), **common),
            "calibration": tm.classification.MulticlassCalibrationError(n_bins=15, **common),
        },
        compute_groups=False,
    )


def label_metrics(num_classes: int, sync: bool = True) -> Any:
    """torchmetrics per class (K,) of probabilities and multi-hot labels (B, K): AP, F1 at 0.5, support in `counts`."""
    tm = require("torchmetrics", "train").classification
    common = {"num_labels": num_classes, "average": None, "validate_args": False, "sync_on_compute": sync}
    metrics = {"ap": tm.MultilabelAveragePrecision, "f1": tm.MultilabelF1Score, "counts": tm.MultilabelStatScores}
    return require("torchmetrics", "train").MetricCollection(
        {name: metric(**common) for name, metric in metrics.items()}, compute_groups=False
    )


def per_class_accuracy(labels: Tensor, predicted: Tensor, num_classes: int) -> list[float | None]:
    """Accuracy of every class, from 0 to 1; None for a class without images."""
    counts = labels.bincount(minlength=num_classes).tolist()
    hits = labels[labels == predicted].bincount(minlength=num_classes).tolist()
    return [hit / count if count else None for hit, count in zip(hits, counts, strict=True)]


def freeze_batch_norms(model: nn.Module) -> None:
    """Put BatchNorms into evaluation mode, as in SViT's fine-tuning at 384 px (Sec. 4.1, authors' code)."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.eval()


def freeze_backbone(model: Any) -> None:
    """Freeze everything but the head: the classifier, or what follows the backbone of a segmenter or detector."""
    if hasattr(model, "backbone_model"):
        model.backbone_model.requires_grad_(False)
    else:
        model.requires_grad_(False)
        model.get_classifier().requires_grad_(True)
