"""What a detector is taught with, checked at the door: torchvision's list of dicts."""

from collections.abc import Sequence

import torch
from torch import Tensor

Target = dict[str, Tensor]


def check_targets(targets: Sequence[Target] | None, images: int, num_classes: int, masks: bool) -> None:
    """One dict an image with boxes (n, 4) in pixels, labels (n,) from 1 to `num_classes`, and masks (n, H, W)."""
    if targets is None or len(targets) != images:
        got = "none" if targets is None else len(targets)
        raise ValueError(f"in training every image needs its target: expected {images}, got {got}. Or call .eval().")
    for i, target in enumerate(targets):
        missing = {"boxes", "labels", *(("masks",) if masks else ())} - target.keys()
        if missing:
            hint = " Without masks, build the detector with masks=False." if missing == {"masks"} else ""
            raise ValueError(f"target {i} lacks {', '.join(sorted(missing))}.{hint}")
        boxes, labels = target["boxes"], target["labels"]
        if boxes.ndim != 2 or boxes.shape[1] != 4 or labels.shape != boxes.shape[:1]:
            raise ValueError(
                f"target {i}: expected boxes (n, 4) and labels (n,), "
                f"got {tuple(boxes.shape)} and {tuple(labels.shape)}."
            )
    labels = torch.cat([target["labels"] for target in targets])
    if len(labels) and (int(labels.min()) < 1 or int(labels.max()) > num_classes):
        raise ValueError(
            f"labels run from 1 to {num_classes} (0 is the background), got {int(labels.min())} to {int(labels.max())}."
        )
