"""torchvision's way of bringing pictures to a detector's size, for all pictures of a batch at once where it can be."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.transform import GeneralizedRCNNTransform

LARGEST = 2**28  # pixels of masks that are resized at once


class BatchTransform(GeneralizedRCNNTransform):
    """Pictures of one size go through it as one picture of many channels: a few launches instead of some a picture."""

    def forward(
        self, images: Sequence[Tensor], targets: Sequence[dict[str, Tensor]] | None = None
    ) -> tuple[ImageList, list[dict[str, Tensor]] | None]:
        """images (3, H, W) each, targets with boxes (n, 4) and masks (n, H, W) -> the same at the detector's size."""
        if not self.at_once(images, targets):
            return super().forward(list(images), targets)  # type: ignore[arg-type]
        batch = self.normalize(torch.stack(list(images)))
        joint = None
        if targets is not None:
            keys = [key for key in ("boxes", "masks") if key in targets[0]]
            joint = {key: torch.cat([target[key] for target in targets]) for key in keys}
        batch, joint = self.resize(batch.flatten(0, 1), joint)
        batch = batch.unflatten(0, (len(images), -1))
        height, width = batch.shape[2:]
        padded = F.pad(batch, (0, -width % self.size_divisible, 0, -height % self.size_divisible))
        found = ImageList(padded, [(height, width)] * len(images))
        if targets is None or joint is None:
            return found, None
        counts = [len(target["boxes"]) for target in targets]
        parts = {key: values.split(counts) for key, values in joint.items()}
        return found, [target | {key: parts[key][i] for key in parts} for i, target in enumerate(targets)]

    def at_once(self, images: Sequence[Tensor], targets: Sequence[dict[str, Tensor]] | None) -> bool:
        """Whether all pictures are alike, and go to the same size."""
        alike = len({image.shape for image in images}) == 1 and images[0].ndim == 3 and len(images) > 1
        if not alike or (self.training and len(self.min_size) > 1) or torch.jit.is_tracing():
            return False
        if targets is None:
            return True
        masks = [target["masks"] for target in targets if "masks" in target]
        sizes = {mask.shape[1:] for mask in masks}
        plain = all("keypoints" not in target and "boxes" in target for target in targets)
        return plain and len(masks) in (0, len(targets)) and len(sizes) < 2 and sum(m.numel() for m in masks) <= LARGEST
