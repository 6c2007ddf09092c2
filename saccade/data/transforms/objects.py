"""One image and its objects -> uint8 tensor and target with the same changes, using torchvision's transforms v2."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from saccade.data.sources.base import DataError
from saccade.data.sources.objects import Objects, trainable_objects

Target = dict[str, Tensor]  # boxes (n, 4), labels (n,), masks (n, H, W) if there are any
ObjectTransform = Callable[[Image.Image, Objects], tuple[Tensor, Target]]

CROPS = ("none", "resized", "detr")
MIN_SIDE = 2  # px; objects whose visible part is smaller along either side are dropped
DETR_RESIZE, DETR_CROP = (400, 500, 600), (384, 600)  # shorter sides before the crop; range of the crop's sides


class EvalObjects:
    """Image (3, H, W), boxes, labels and masks as tensors at their own size."""

    def __call__(self, image: Image.Image, objects: Objects) -> tuple[Tensor, Target]:
        pixels, target = to_tv_tensors(image, trainable_objects(objects, image.size))
        return pixels.as_subclass(Tensor), to_tensors(target)


class TrainObjects:
    """Training augmentation of an image and its objects.

    Args:
        size: largest side of the result, for crop="resized".
        crop: "none" (the detector resizes, possibly to several sizes); "detr" crops a random window from half of the
            images; "resized" scales the longer side to `size` times a random factor in `scale`, then crops a window
            of at most `size` px per side.
        flip, vertical_flip: probabilities.
        jitter: strength of random brightness, contrast and saturation.
    """

    def __init__(
        self,
        size: int | None = None,
        crop: str = "none",
        scale: tuple[float, float] = (0.5, 2.0),
        flip: float = 0.5,
        vertical_flip: float = 0.0,
        jitter: float = 0.0,
    ):
        if crop not in CROPS:
            raise DataError(f"expected augment.crop to be {', '.join(CROPS)} for detection, got {crop!r}.")
        if crop == "resized" and size is None:
            raise DataError("augment.crop=resized needs the size of the crop. Set data.image_size.")
        self.size, self.crop, self.scale = size, crop, scale
        steps: list[Callable[..., Any]] = [v2.RandomHorizontalFlip(flip), v2.RandomVerticalFlip(vertical_flip)]
        if jitter:
            steps.append(v2.ColorJitter(jitter, jitter, jitter))
        self.flip_and_jitter = v2.Compose(steps)

    def __call__(self, image: Image.Image, objects: Objects) -> tuple[Tensor, Target]:
        pixels, target = to_tv_tensors(image, trainable_objects(objects, image.size))
        if self.crop == "detr" and torch.rand(()) < 0.5:
            height, width = pixels.shape[-2:]
            pixels, target = crop_objects(pixels, target, *detr_crop_window(height, width))
        elif self.crop == "resized":
            pixels, target = self.resized_crop(pixels, target)
        pixels, target = self.flip_and_jitter(pixels, target)
        return pixels.as_subclass(Tensor), to_tensors(target)

    def resized_crop(self, pixels: Tensor, target: Target) -> tuple[Tensor, Target]:
        """Crop in the original image first, then resize: pixels outside the window are never resampled."""
        assert self.size is not None
        height, width = pixels.shape[-2:]
        low, high = self.scale
        factor = float(torch.empty(()).uniform_(low, high)) * self.size / max(height, width)
        side = max(1, round(self.size / factor))  # of the window in the original image
        crop_height, crop_width = min(side, height), min(side, width)
        window = _random_window(height, width, crop_height, crop_width)
        pixels, target = crop_objects(pixels, target, *window)
        size = [max(1, min(self.size, round(factor * length))) for length in (crop_height, crop_width)]
        resized = {"boxes": v2.functional.resize(target["boxes"], size), "labels": target["labels"]}
        if "masks" in target:  # torchvision's "nearest" rounds down, half a pixel off; "nearest-exact" does not
            masks = F.interpolate(target["masks"].as_subclass(Tensor)[:, None], size, mode="nearest-exact")[:, 0]
            resized["masks"] = tv_tensors.Mask(masks)
        return v2.functional.resize(pixels, size, antialias=True), drop_cropped_objects(resized)


def detr_crop_window(height: int, width: int) -> tuple[int, int, int, int]:
    """Top, left, height, width of the random crop of DETR and PaCa: 384 to 600 px of the image at 400, 500 or 600 px.

    In pixels of the original image, because the detector resizes: pixels are interpolated once.
    """
    factor = min(height, width) / DETR_RESIZE[int(torch.randint(len(DETR_RESIZE), ()))]
    low, high = DETR_CROP
    crop_height, crop_width = (
        min(round(factor * int(torch.randint(low, high + 1, ()))), side) for side in (height, width)
    )
    return _random_window(height, width, crop_height, crop_width)


def _random_window(height: int, width: int, crop_height: int, crop_width: int) -> tuple[int, int, int, int]:
    top, left = (int(torch.randint(margin + 1, ())) for margin in (height - crop_height, width - crop_width))
    return top, left, crop_height, crop_width


def crop_objects(pixels: Tensor, target: Target, top: int, left: int, height: int, width: int) -> tuple[Tensor, Target]:
    """Crop an image and its objects; objects outside the window are dropped."""
    window = (top, left, height, width)
    cropped = {
        key: v2.functional.crop(value, *window) if isinstance(value, tv_tensors.TVTensor) else value
        for key, value in target.items()
    }
    return v2.functional.crop(pixels, *window), drop_cropped_objects(cropped)


def to_tv_tensors(image: Image.Image, objects: Objects) -> tuple[tv_tensors.Image, Target]:
    """torchvision's tensor types, by which its transforms tell images, boxes and masks apart."""
    pixels = tv_tensors.Image(v2.functional.pil_to_tensor(image))
    # pyright checks Tensor.__init__, which torch's stubs declare, instead of BoundingBoxes.__new__.
    boxes = tv_tensors.BoundingBoxes(  # pyright: ignore[reportCallIssue]
        torch.from_numpy(objects.boxes),
        format=tv_tensors.BoundingBoxFormat.XYXY,
        canvas_size=(image.height, image.width),
        dtype=torch.float32,
    )
    target: Target = {"boxes": boxes, "labels": torch.from_numpy(objects.labels)}
    if objects.masks is not None:
        target["masks"] = tv_tensors.Mask(objects.masks)
    return pixels, target


def to_tensors(target: Target) -> Target:
    """Plain tensors instead of torchvision's types."""
    return {key: value.as_subclass(Tensor) for key, value in target.items()}


def drop_cropped_objects(target: Target) -> Target:
    """Remove objects that a crop left with less than MIN_SIDE px; boxes are tightened to the masks, if any."""
    boxes, masks = target["boxes"], target.get("masks")
    if masks is not None:
        boxes = _wrap_like(tight_boxes(masks.as_subclass(Tensor)), boxes)
    large_enough = ((boxes[:, 2:] - boxes[:, :2]) >= MIN_SIDE).all(1).as_subclass(Tensor)
    return {key: _wrap_like(value[large_enough], value) for key, value in (target | {"boxes": boxes}).items()}


def _wrap_like(value: Tensor, like: Tensor) -> Tensor:
    """`value` with the torchvision type of `like`, if it has one."""
    if not isinstance(like, tv_tensors.TVTensor):
        return value
    return tv_tensors.wrap(value, like=like)  # pyright: ignore[reportCallIssue] # hidden by torch.compiler.disable


def tight_boxes(masks: Tensor) -> Tensor:
    """masks (n, H, W) -> bounding boxes (n, 4) as x0 y0 x1 y1, zeros for an empty mask.

    torchvision's masks_to_boxes returns the index of the last pixel, one less, and loops over masks: 82 ms instead of
    8 ms for 200 masks of 512 px.
    """
    boxes = torch.zeros(len(masks), 4)
    for axis, (low, high) in ((1, (0, 2)), (2, (1, 3))):
        occupied = masks.amax(axis) > 0  # (n, W), then (n, H); `any` is thirty times slower on uint8
        length = occupied.shape[1]
        first, last = occupied.long().argmax(1), length - occupied.flip(1).long().argmax(1)
        boxes[:, low] = torch.where(occupied.any(1), first, 0).float()
        boxes[:, high] = torch.where(occupied.any(1), last, 0).float()
    return boxes


def pack_masks(masks: Tensor) -> Tensor:
    """masks (n, H, W) of 0 and 1 -> (n, H, ceil(W / 8)) uint8, eight pixels per byte.

    Without packing, a batch of crowded images takes hundreds of megabytes between DataLoader workers and the GPU.
    """
    return torch.from_numpy(np.packbits(masks.numpy(), axis=-1))


def unpack_masks(packed: Tensor, width: int) -> Tensor:
    """Inverse of `pack_masks`, on any device."""
    bits = 7 - torch.arange(8, dtype=torch.uint8, device=packed.device)  # the first pixel is the highest bit
    return (packed.unsqueeze(-1) >> bits & 1).flatten(-2)[..., :width]
