"""A picture and its objects, changed together by torchvision's transforms v2."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from saccade.data.sources.base import DataError
from saccade.data.sources.objects import Objects, learnable

Target = dict[str, Tensor]
ObjectTransform = Callable[[Image.Image, Objects], tuple[Tensor, Target]]

CROPS = ("none", "resized", "detr")
FEWEST = 2  # pixels that must be left of an object, along either side
DETR_SIDES, DETR_WINDOW = (400, 500, 600), (384, 600)  # shorter sides before the crop, and sides of the crop


class StraightObjects:
    """As they are: uint8 picture (3, H, W), boxes, labels and masks."""

    def __call__(self, image: Image.Image, objects: Objects) -> tuple[Tensor, Target]:
        picture, target = to_tensors(image, learnable(objects, image.size))
        return picture.as_subclass(Tensor), plain(target)


class AugmentObjects:
    """Changes a training picture with its objects.

    Args:
        size: largest side of the result, for "resized".
        crop: "none" keeps the picture (the detector resizes it, to several sizes if asked); "detr" keeps every second
            one and cuts a random window from the others; "resized" scales the picture, its longer side to `size` times
            a number between those of `scale`, and cuts a window of at most `size` px a side from that.
        flip, vertical_flip: probabilities. jitter: of brightness, contrast and saturation.
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
            raise DataError(f"objects can be cropped by {', '.join(CROPS)}; got {crop!r}.")
        if crop == "resized" and size is None:
            raise DataError("crop=resized cuts pictures to one size: set data.image_size.")
        self.size, self.crop, self.scale = size, crop, scale
        steps: list = [v2.RandomHorizontalFlip(flip), v2.RandomVerticalFlip(vertical_flip)]
        if jitter:
            steps.append(v2.ColorJitter(jitter, jitter, jitter))
        self.change = v2.Compose(steps)

    def __call__(self, image: Image.Image, objects: Objects) -> tuple[Tensor, Target]:
        picture, target = to_tensors(image, learnable(objects, image.size))
        if self.crop == "detr" and torch.rand(()) < 0.5:
            picture, target = cut(picture, target, *detr_window(*picture.shape[-2:]))
        elif self.crop == "resized":
            picture, target = self.rescale(picture, target)
        picture, target = self.change(picture, target)
        return picture.as_subclass(Tensor), plain(target)

    def rescale(self, picture: Tensor, target: Target) -> tuple[Tensor, Target]:
        """The window is cut before it is scaled: what lies outside costs nothing."""
        assert self.size is not None
        height, width = picture.shape[-2:]
        low, high = self.scale
        factor = float(torch.empty(()).uniform_(low, high)) * self.size / max(height, width)
        reach = max(1, round(self.size / factor))  # side of the window in the picture
        tall, wide = min(reach, height), min(reach, width)
        picture, target = cut(picture, target, *_anywhere(height, width, tall, wide))
        side = [max(1, min(self.size, round(factor * length))) for length in (tall, wide)]
        resized = {"boxes": v2.functional.resize(target["boxes"], side), "labels": target["labels"]}
        if "masks" in target:  # torchvision takes the pixel up left of the nearest one: half a pixel off
            masks = F.interpolate(target["masks"].as_subclass(Tensor)[:, None], side, mode="nearest-exact")[:, 0]
            resized["masks"] = tv_tensors.Mask(masks)
        return v2.functional.resize(picture, side, antialias=True), settle(resized)


def detr_window(height: int, width: int) -> tuple[int, int, int, int]:
    """The crop of DETR and PaCa (PACA-61): a window of 384 to 600 px a side of the picture at 400, 500 or 600 px.

    Top, left, height, width in the picture as it is: resizing is left to the detector, so pixels are interpolated once.
    """
    share = min(height, width) / DETR_SIDES[int(torch.randint(len(DETR_SIDES), ()))]
    low, high = DETR_WINDOW
    tall, wide = (min(round(share * int(torch.randint(low, high + 1, ()))), side) for side in (height, width))
    return _anywhere(height, width, tall, wide)


def _anywhere(height: int, width: int, tall: int, wide: int) -> tuple[int, int, int, int]:
    top, left = (int(torch.randint(room + 1, ())) for room in (height - tall, width - wide))
    return top, left, tall, wide


def cut(picture: Tensor, target: Target, top: int, left: int, height: int, width: int) -> tuple[Tensor, Target]:
    """A window of a picture, with what is left of its objects."""
    window = (top, left, height, width)
    moved = {
        key: v2.functional.crop(value, *window) if isinstance(value, tv_tensors.TVTensor) else value
        for key, value in target.items()
    }
    return v2.functional.crop(picture, *window), settle(moved)


def to_tensors(image: Image.Image, objects: Objects) -> tuple[tv_tensors.Image, Target]:
    """In torchvision's types, so that its transforms know what is what."""
    picture = tv_tensors.Image(v2.functional.pil_to_tensor(image))
    size = (picture.shape[-2], picture.shape[-1])
    target: Target = {
        "boxes": tv_tensors.BoundingBoxes(objects.boxes, format="XYXY", canvas_size=size, dtype=torch.float32),
        "labels": torch.from_numpy(objects.labels),
    }
    if objects.masks is not None:
        target["masks"] = tv_tensors.Mask(objects.masks)
    return picture, target


def plain(target: Target) -> Target:
    return {key: value.as_subclass(Tensor) for key, value in target.items()}


def settle(target: Target) -> Target:
    """Without what was cut away; where masks tell, boxes lie around what is left of their objects."""
    boxes, masks = target["boxes"], target.get("masks")
    if masks is not None:
        boxes = tv_tensors.wrap(tight_boxes(masks.as_subclass(Tensor)), like=boxes)
    kept = ((boxes[:, 2:] - boxes[:, :2]) >= FEWEST).all(1).as_subclass(Tensor)
    return {
        key: tv_tensors.wrap(value[kept], like=value) if isinstance(value, tv_tensors.TVTensor) else value[kept]
        for key, value in (target | {"boxes": boxes}).items()
    }


def tight_boxes(masks: Tensor) -> Tensor:
    """masks (n, H, W) -> boxes (n, 4) around their pixels, zero for an empty one.

    torchvision's masks_to_boxes gives the number of the last pixel, one less, and goes mask by mask: 82 ms in place of
    8 for 200 masks of 512 px.
    """
    boxes = torch.zeros(len(masks), 4)
    for axis, (low, high) in ((1, (0, 2)), (2, (1, 3))):
        line = masks.amax(axis) > 0  # (n, W), then (n, H); `any` is thirty times slower on bytes
        length = line.shape[1]
        first, last = line.long().argmax(1), length - line.flip(1).long().argmax(1)
        boxes[:, low] = torch.where(line.any(1), first, 0).float()
        boxes[:, high] = torch.where(line.any(1), last, 0).float()
    return boxes
