"""Validation of detection targets: torchvision's list of dicts."""

from collections.abc import Sequence

import torch
from torch import Tensor

DetectionTarget = dict[str, Tensor]


def check_targets(targets: Sequence[DetectionTarget] | None, images: int, num_classes: int, masks: bool) -> None:
    """Raise ValueError unless there is one dict per image with boxes (n, 4), labels (n,) and, if `masks`, masks."""
    if targets is None or len(targets) != images:
        got = "none" if targets is None else len(targets)
        raise ValueError(f"training expected one target per image ({images}), got {got}. For inference, call .eval().")
    for i, target in enumerate(targets):
        missing = {"boxes", "labels", *(("masks",) if masks else ())} - target.keys()
        if missing:
            hint = " To train without masks, build the detector with masks=False." if missing == {"masks"} else ""
            raise ValueError(f"target {i} has no {', '.join(sorted(missing))}.{hint}")
        boxes, labels = target["boxes"], target["labels"]
        if boxes.ndim != 2 or boxes.shape[1] != 4 or labels.shape != boxes.shape[:1]:
            raise ValueError(
                f"target {i}: expected boxes (n, 4) and labels (n,), "
                f"got {tuple(boxes.shape)} and {tuple(labels.shape)}."
            )
    labels = torch.cat([target["labels"] for target in targets])
    if len(labels) and (int(labels.min()) < 1 or int(labels.max()) > num_classes):
        raise ValueError(
            f"expected labels from 1 to {num_classes} (0 is the background), "
            f"got {int(labels.min())} to {int(labels.max())}."
        )
