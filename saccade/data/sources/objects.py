"""Pictures with objects: boxes, labels and masks, whatever they were stored as, and as COCO would write them."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from PIL import Image

from saccade._extras import require
from saccade.data.sources.base import DataError
from saccade.data.synthetic.scenes import Frame, Scenes


class Objects(NamedTuple):
    """The objects of one picture."""

    boxes: np.ndarray  # (n, 4) float32: x0 y0 x1 y1 in pixels
    labels: np.ndarray  # (n,) int64, from 1
    masks: np.ndarray | None  # (n, H, W) uint8
    crowd: np.ndarray  # (n,) bool: a group that nobody told apart
    ids: np.ndarray  # (n,) int64, of the annotations

    def take(self, chosen: np.ndarray) -> "Objects":
        """Those at some places, or where a mask of truth values has them."""
        return Objects(*(None if field is None else field[chosen] for field in self))


class ObjectSource(Protocol):
    """Pictures with objects that can be counted, named and read one by one."""

    classes: list[str]
    category_ids: list[int]  # of the classes, in COCO's files; they may have gaps
    image_ids: np.ndarray  # (N,) int64
    has_masks: bool

    def __len__(self) -> int: ...

    def read(self, index: int) -> Image.Image: ...

    def name(self, index: int) -> str: ...

    def objects(self, index: int, size: tuple[int, int]) -> Objects:
        """All annotations of picture `index`, whose size is (width, height)."""
        ...

    def ground_truth(self) -> dict[str, Any]:
        """The set as COCO writes it, for its metric."""
        ...


class SceneObjects(Scenes):
    """The embedded scenes: every shape is an object. One that is hidden by more than half cannot be told from others,
    so it is marked like a crowd, neither taught nor counted.
    """

    has_masks = True

    def __init__(self, count: int = 512, size: int = 128, split: str = "train", seed: int = 0):
        super().__init__(count, size, split, seed)
        self.category_ids = list(range(1, len(self.classes) + 1))
        self.image_ids = np.arange(1, count + 1)
        self._last: tuple[int, Frame] | None = None

    def frame(self, index: int) -> Frame:
        """Picture and objects are asked for one after the other, and drawn once."""
        if self._last is None or self._last[0] != index:
            self._last = index, super().frame(index)
        return self._last[1]

    def objects(self, index: int, size: tuple[int, int] | None = None) -> Objects:
        frame = self.frame(index)
        count = len(frame.boxes)
        masks = (frame.instances == np.arange(1, count + 1)[:, None, None]).astype(np.uint8)
        ids = 100 * index + np.arange(1, count + 1)
        return Objects(frame.boxes, frame.shapes + 1, masks, frame.shown < 0.5, ids)

    def ground_truth(self) -> dict[str, Any]:
        return write_coco(self)


class ObjectSubset:
    """Some pictures of a source."""

    def __init__(self, source: ObjectSource, indices: Sequence[int] | np.ndarray):
        self.source, self.indices = source, np.asarray(indices, dtype=np.int64)
        self.classes, self.category_ids = source.classes, source.category_ids
        self.image_ids, self.has_masks = source.image_ids[self.indices], source.has_masks

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> Image.Image:
        return self.source.read(int(self.indices[index]))

    def name(self, index: int) -> str:
        return self.source.name(int(self.indices[index]))

    def objects(self, index: int, size: tuple[int, int]) -> Objects:
        return self.source.objects(int(self.indices[index]), size)

    def ground_truth(self) -> dict[str, Any]:
        whole, chosen = self.source.ground_truth(), set(self.image_ids.tolist())
        return whole | {
            "images": [about for about in whole["images"] if about["id"] in chosen],
            "annotations": [about for about in whole["annotations"] if about["image_id"] in chosen],
        }


def learnable(objects: Objects, size: tuple[int, int]) -> Objects:
    """What a detector can learn from: boxes cut to the picture, without crowds and without boxes of no area."""
    width, height = size
    boxes = objects.boxes.clip(0, np.array([width, height, width, height], np.float32))
    kept = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1]) & ~objects.crowd
    if objects.masks is not None:
        kept &= objects.masks.any((1, 2))
    return objects._replace(boxes=boxes).take(kept)


def hold_out_objects(source: ObjectSource, fraction: float, seed: int = 0) -> tuple[ObjectSubset, ObjectSubset]:
    """Split off `fraction` of the pictures for validation; the same seed gives the same split."""
    if not 0 < fraction < 1 or len(source) < 2:
        raise DataError(f"cannot hold out {fraction} of {len(source)} pictures: give a validation set of its own.")
    order = np.random.default_rng(seed).permutation(len(source))
    held = max(1, round(fraction * len(source)))
    return ObjectSubset(source, np.sort(order[held:])), ObjectSubset(source, np.sort(order[:held]))


def write_coco(source: ObjectSource) -> dict[str, Any]:
    """Any source as COCO's JSON, with exact masks as run lengths; annotations are numbered from 1."""
    images, annotations = [], []
    for image_id, size, objects in _walk(source):
        images.append({"id": image_id, "width": size[0], "height": size[1], "file_name": str(image_id)})
        codes = _encode(objects.masks) if objects.masks is not None else [None] * len(objects.labels)
        for box, label, crowd, code in zip(objects.boxes, objects.labels, objects.crowd, codes, strict=True):
            x, y, width, height = (float(v) for v in (box[0], box[1], box[2] - box[0], box[3] - box[1]))
            area = float(require("pycocotools.mask", "train").area(code)) if code else width * height
            annotations.append(
                {
                    "id": len(annotations) + 1,  # never 0: pycocotools takes that for no match
                    "image_id": image_id,
                    "category_id": source.category_ids[int(label) - 1],
                    "bbox": [x, y, width, height],
                    "area": area,
                    "iscrowd": int(crowd),
                    **({"segmentation": code} if code else {}),
                }
            )
    names = zip(source.category_ids, source.classes, strict=True)
    return {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": number, "name": name} for number, name in names],
    }


def _walk(source: ObjectSource) -> Iterator[tuple[int, tuple[int, int], Objects]]:
    for index in range(len(source)):
        size = source.read(index).size
        yield int(source.image_ids[index]), size, source.objects(index, size)


def _encode(masks: np.ndarray) -> list[dict[str, Any]]:
    codes = require("pycocotools.mask", "train").encode(np.asfortranarray(masks.transpose(1, 2, 0)))
    return [code | {"counts": code["counts"].decode()} for code in codes]
