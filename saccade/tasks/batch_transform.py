"""torchvision's detection transform, batched over images of one size."""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.transform import GeneralizedRCNNTransform

MAX_BATCHED_MASK_PIXELS = 2**28  # larger batches of masks are resized per image, to bound memory


class BatchTransform(GeneralizedRCNNTransform):
    """Resize images of one size as one image of many channels: a few kernel launches per batch, not per image."""

    def forward(
        self, images: Sequence[Tensor], targets: Sequence[dict[str, Tensor]] | None = None
    ) -> tuple[ImageList, list[dict[str, Tensor]] | None]:
        """images (3, H, W), targets with boxes (n, 4) and masks (n, H, W) -> normalised, resized, padded."""
        if not self.can_batch(images, targets):
            return super().forward(list(images), targets)  # type: ignore[arg-type] # torchvision declares a list
        batch = self.normalize(torch.stack(list(images)))
        joint = None
        if targets is not None:
            keys = [key for key in ("boxes", "masks") if key in targets[0]]
            joint = {key: torch.cat([target[key] for target in targets]) for key in keys}
        batch, joint = self.resize(batch.flatten(0, 1), joint)
        batch = batch.unflatten(0, (len(images), -1))
        height, width = batch.shape[2:]
        padded = F.pad(batch, (0, -width % self.size_divisible, 0, -height % self.size_divisible))
        image_list = ImageList(padded, [(height, width)] * len(images))
        if targets is None or joint is None:
            return image_list, None
        counts = [len(target["boxes"]) for target in targets]
        parts = {key: values.split(counts) for key, values in joint.items()}
        return image_list, [target | {key: parts[key][i] for key in parts} for i, target in enumerate(targets)]

    def can_batch(self, images: Sequence[Tensor], targets: Sequence[dict[str, Tensor]] | None) -> bool:
        """Whether all images have one size and are resized to one size."""
        one_size = len({image.shape for image in images}) == 1 and images[0].ndim == 3 and len(images) > 1
        sides = cast(tuple[int, ...], self.min_size)  # torchvision annotates it as int
        if not one_size or (self.training and len(sides) > 1):
            return False
        if targets is None:
            return True
        masks = [target["masks"] for target in targets if "masks" in target]
        mask_sizes = {mask.shape[1:] for mask in masks}
        mask_pixels = sum(mask.numel() for mask in masks)
        return (
            all("keypoints" not in target and "boxes" in target for target in targets)
            and len(masks) in (0, len(targets))
            and len(mask_sizes) < 2
            and mask_pixels <= MAX_BATCHED_MASK_PIXELS
        )
