"""Losses of classification and segmentation: cross-entropy, also binary, with class weights; focal loss; Dice loss."""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = 255  # unlabelled mask pixels: excluded from losses and metrics


def class_loss(
    logits: Tensor,
    targets: Tensor,
    weight: Tensor | None = None,
    focal_gamma: float = 0.0,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> Tensor:
    """Mean cross-entropy of logits (B, K, …) with class indices (B, …), or with class probabilities (B, K) of mixup.

    `weight` (K,) multiplies the terms of a class; the mean is weighted likewise. `focal_gamma` multiplies every term by
    (1 - p) ** gamma with the probability p of its class (focal loss, arXiv 1708.02002, Eq. 4). The loss without any
    labelled target is 0, not 0 / 0.
    """
    logits = logits.float()
    weight = None if weight is None else weight.to(logits)
    if targets.is_floating_point():  # already smoothed
        log_p = logits.log_softmax(1)
        terms = -targets * log_p * (1 if weight is None else weight)
        return (terms * (1 - log_p.exp()) ** focal_gamma if focal_gamma else terms).sum(1).mean()
    losses = F.cross_entropy(
        logits, targets, weight, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    if focal_gamma:
        p = torch.exp(-F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="none"))
        losses = losses * (1 - p) ** focal_gamma
    labelled = targets != ignore_index
    if weight is None:
        return losses.sum() / labelled.sum().clamp(min=1)
    return losses.sum() / (weight[targets.where(labelled, 0)] * labelled).sum().clamp(min=1e-6)


def label_loss(
    logits: Tensor, targets: Tensor, positive_weight: Tensor | None = None, focal_gamma: float = 0.0
) -> Tensor:
    """Binary cross-entropy (B, K) of logits with multi-hot targets (B, K), or with the fractions of mixup.

    `positive_weight` (K,) multiplies the terms of present classes. `focal_gamma` multiplies every term by
    (1 - p) ** gamma with the probability p of its target (focal loss, arXiv 1708.02002, Eq. 4).
    """
    logits = logits.float()
    weight = None if positive_weight is None else positive_weight.to(logits)
    losses = F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weight, reduction="none")
    if focal_gamma:
        p = logits.sigmoid()
        losses = losses * (1 - (p * targets + (1 - p) * (1 - targets))) ** focal_gamma
    return losses


def dice_loss(logits: Tensor, masks: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """One minus the mean Dice coefficient of the classes in the batch: logits (B, K, H, W), masks (B, H, W) -> ()."""
    labelled = masks != ignore_index
    p = logits.float().softmax(1) * labelled[:, None]  # (B, K, H, W)
    truth = F.one_hot(masks.where(labelled, 0), logits.shape[1]).movedim(-1, 1) * labelled[:, None]
    sizes = truth.sum((0, 2, 3))
    dice = (2 * (p * truth).sum((0, 2, 3)) + 1) / (p.sum((0, 2, 3)) + sizes + 1)
    present = sizes > 0
    return 1 - (dice * present).sum() / present.sum().clamp(min=1) if present.any() else 0 * p.sum()


def balanced_weights(counts: Tensor) -> Tensor:
    """Class weights (K,) inversely proportional to the number of samples (K,), with mean 1 over the samples."""
    counts = counts.double()
    present = counts > 0
    return torch.where(present, counts.sum() / (present.sum() * counts.clamp(min=1)), 1.0).float()


def positive_weights(counts: Tensor, total: int) -> Tensor:
    """Weights (K,) of present classes, absent / present, from the number of samples (K,); 1 for a class without any."""
    counts = counts.double()
    return torch.where(counts > 0, (total - counts) / counts.clamp(min=1), 1.0).float()
