"""The interface of detection datasets: boxes, labels and masks per image, and conversion to COCO's format."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from PIL import Image

from saccade._extras import require
from saccade.data.decode.image import BadImage


class Objects(NamedTuple):
    """The annotated objects of one image."""

    boxes: np.ndarray  # (n, 4) float32: x0 y0 x1 y1 in pixels
    labels: np.ndarray  # (n,) int64, from 1
    masks: np.ndarray | None  # (n, H, W) uint8
    crowd: np.ndarray  # (n,) bool: COCO's iscrowd
    ids: np.ndarray  # (n,) int64, annotation ids

    def select(self, selection: np.ndarray) -> "Objects":
        """Objects at indices, or where a boolean array is true."""
        masks = None if self.masks is None else self.masks[selection]
        return Objects(self.boxes[selection], self.labels[selection], masks, self.crowd[selection], self.ids[selection])


class ObjectSource(Protocol):
    """Images with objects, read by index."""

    classes: list[str]
    category_ids: list[int]  # COCO id of each class; may have gaps
    image_ids: np.ndarray  # (N,) int64
    has_masks: bool

    def __len__(self) -> int: ...

    def read(self, index: int) -> Image.Image: ...

    def name(self, index: int) -> str: ...

    def objects(self, index: int, size: tuple[int, int]) -> Objects:
        """All annotations of image `index`, whose size is (width, height)."""
        ...

    def ground_truth(self) -> dict[str, Any]:
        """The dataset in COCO's format, for pycocotools."""
        ...


def load_objects(source: ObjectSource, transform: Callable[..., Any], index: int) -> tuple[Any, Any]:
    """Transformed image and objects, as a sample for a loader."""
    image = source.read(index)
    return transform(image, source.objects(index, image.size))


def trainable_objects(objects: Objects, size: tuple[int, int]) -> Objects:
    """Objects with boxes clipped to the image, without crowds and without empty boxes or masks."""
    width, height = size
    boxes = objects.boxes.clip(0, np.array([width, height, width, height], np.float32))
    valid = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1]) & ~objects.crowd
    if objects.masks is not None:
        valid &= objects.masks.any((1, 2))
    return objects._replace(boxes=boxes).select(valid)


def to_coco(source: ObjectSource) -> dict[str, Any]:
    """A dataset in COCO's format, with masks as run lengths; annotations are numbered from 1."""
    images, annotations = [], []
    for index in range(len(source)):
        try:
            image_id, size = int(source.image_ids[index]), source.read(index).size
        except BadImage:
            continue  # not evaluated either
        objects = source.objects(index, size)
        images.append({"id": image_id, "width": size[0], "height": size[1], "file_name": str(image_id)})
        run_lengths = _encode_masks(objects.masks) if objects.masks is not None else [None] * len(objects.labels)
        for box, label, crowd, rle in zip(objects.boxes, objects.labels, objects.crowd, run_lengths, strict=True):
            x, y, width, height = (float(v) for v in (box[0], box[1], box[2] - box[0], box[3] - box[1]))
            area = float(require("pycocotools.mask", "train").area(rle)) if rle else width * height
            annotations.append(
                {
                    "id": len(annotations) + 1,  # not 0, which pycocotools reads as "no match"
                    "image_id": image_id,
                    "category_id": source.category_ids[int(label) - 1],
                    "bbox": [x, y, width, height],
                    "area": area,
                    "iscrowd": int(crowd),
                    **({"segmentation": rle} if rle else {}),
                }
            )
    categories = zip(source.category_ids, source.classes, strict=True)
    return {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": category_id, "name": name} for category_id, name in categories],
    }


def _encode_masks(masks: np.ndarray) -> list[dict[str, Any]]:
    """(n, H, W) -> compressed run lengths, as JSON stores them."""
    run_lengths = require("pycocotools.mask", "train").encode(np.asfortranarray(masks.transpose(1, 2, 0)))
    return [rle | {"counts": rle["counts"].decode()} for rle in run_lengths]
