"""Objects in COCO's JSON format: polygons, run lengths, crowds, images without objects, ids with gaps."""

import json
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from saccade._extras import printable, require
from saccade.data.decode.image import BadImage, read_image
from saccade.data.sources.base import DataError, check_known_classes
from saccade.data.sources.objects import Objects

_logger = logging.getLogger(__name__)
MAX_EXTENT = 1000  # length of a polygon and its distance from the image, in half perimeters of the image


class CocoSource:
    """A COCO annotation file and the folder that its file names are relative to.

    Labels count from 1 in the order of the category ids, or of `classes`. Images that are missing on disk are skipped
    with a warning; if all are missing, that is an error. An invalid annotation is an error that names its id; boxes
    that are empty or outside the image are valid here (see `objects.trainable_objects`).
    """

    def __init__(self, annotations: str | Path, images: str | Path, classes: list[str] | None = None):
        self.file, self.root = Path(annotations), Path(images)
        document = read_json(self.file)
        self.classes, self.category_ids = _index_categories(document["categories"], classes, self.file)
        labels = {category_id: i + 1 for i, category_id in enumerate(self.category_ids)}
        entries = _index_by_id(document["images"], "image", self.file)
        per_image: dict[int, list[dict]] = {image_id: [] for image_id in entries}
        for annotation in _index_by_id(document["annotations"], "annotation", self.file).values():
            _check_annotation(annotation, entries, labels, self.file)
            per_image[annotation["image_id"]].append(annotation)
        image_ids = self._existing_images(entries, per_image)
        self.image_ids = np.array(image_ids, dtype=np.int64)
        self.paths = [entries[image_id]["file_name"] for image_id in image_ids]
        self.sizes = [(entries[image_id].get("width"), entries[image_id].get("height")) for image_id in image_ids]
        segmented = [bool(item.get("segmentation")) for image_id in image_ids for item in per_image[image_id]]
        self.has_masks = bool(segmented) and all(segmented)
        # One array of JSON text: forked DataLoader workers share its pages, while Python objects would be copied on
        # write by reference counting.
        lines = [json.dumps([_compact(item, labels) for item in per_image[i]]).encode() for i in image_ids]
        self._offsets = np.cumsum([0] + [len(data) for data in lines])
        self._annotations = np.frombuffer(b"".join(lines), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> Image.Image:
        image, expected = read_image(self.root / self.paths[index]), self.sizes[index]
        if None not in expected and image.size != expected:
            raise BadImage(self.name(index), f"expected {expected} px as in {self.file.name}, got {image.size} px")
        return image

    def name(self, index: int) -> str:
        return printable(self.root / self.paths[index])

    def objects(self, index: int, size: tuple[int, int]) -> Objects:
        annotations = json.loads(self._annotations[self._offsets[index] : self._offsets[index + 1]].tobytes())
        boxes = np.array([item["bbox"] for item in annotations], np.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        masks = None
        if self.has_masks:
            rendered = [render_mask(item["segmentation"], size, item["id"], self.file) for item in annotations]
            masks = np.stack(rendered) if rendered else np.zeros((0, size[1], size[0]), np.uint8)
        labels, crowd, ids = ([item[key] for item in annotations] for key in ("label", "iscrowd", "id"))
        return Objects(boxes, np.array(labels, np.int64), masks, np.array(crowd, bool), np.array(ids, np.int64))

    def ground_truth(self) -> dict[str, Any]:
        """The file without its missing images, completed for pycocotools.

        Missing values of area and iscrowd are filled in; polygons of fewer than three points are removed.
        """
        document, ids = read_json(self.file), set(self.image_ids.tolist())
        images = [entry for entry in document["images"] if entry["id"] in ids]
        sizes = {entry["id"]: (entry.get("width"), entry.get("height")) for entry in images}
        annotations = [item for item in document["annotations"] if item["image_id"] in ids]
        for item in annotations:
            item.setdefault("iscrowd", 0)
            if isinstance(item.get("segmentation"), list):
                item["segmentation"] = _valid_polygons(item["segmentation"]) or [[0.0] * 6]  # a point, of area 0
            if "area" not in item:
                item["area"] = _area(item, sizes[item["image_id"]], self.file)
        return {"images": images, "annotations": annotations, "categories": document["categories"]}

    def _existing_images(self, entries: dict[int, dict], per_image: dict[int, list[dict]]) -> list[int]:
        """Ids of the images on disk, in the order of the file. Lists each folder once instead of testing each file."""
        listings: dict[str, set[str]] = {}
        existing, missing = [], []
        for image_id, entry in entries.items():
            folder, name = os.path.split(os.path.join(self.root, entry["file_name"]))
            if folder not in listings:
                listings[folder] = set(os.listdir(folder)) if os.path.isdir(folder) else set()
            (existing if name in listings[folder] else missing).append(image_id)
        if not missing:
            return existing
        first = missing[0]
        annotation = f", annotation {per_image[first][0]['id']}" if per_image[first] else ""
        example = f"{os.path.join(self.root, entries[first]['file_name'])} (image {first}{annotation})"
        if not existing:
            raise DataError(f"expected the {len(missing)} images of {self.file} in {self.root}, got none: {example}.")
        _logger.warning(
            "skipping %d of %d images of %s that are missing, such as %s",
            len(missing),
            len(entries),
            self.file,
            example,
        )
        return existing


def read_json(file: Path) -> dict[str, Any]:
    """A COCO annotation file, with its three lists."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read {file}: {error}") from error
    keys = document if isinstance(document, dict) else {}
    if missing := [key for key in ("images", "annotations", "categories") if key not in keys]:
        raise DataError(f"expected a COCO annotation file, got {file} without {', '.join(missing)}.")
    for key in ("images", "annotations", "categories"):
        if not isinstance(document[key], list) or not all(isinstance(entry, dict) for entry in document[key]):
            raise DataError(f"expected a list of objects as {key} of {file}, got another value.")
    for entry in document["images"]:
        name, size = entry.get("file_name"), (entry.get("width"), entry.get("height"))
        if not isinstance(name, str) or not name or "\0" in name:
            raise DataError(f"{file}, image {entry.get('id')}: expected a file name, got {name!r}.")
        if not all(value is None or _is_integer(value) for value in size):
            raise DataError(f"{file}, image {entry.get('id')}: expected integers as width and height, got {size}.")
    return document


def render_mask(segmentation: Any, size: tuple[int, int], annotation_id: int, file: Path) -> np.ndarray:
    """Polygons or run lengths -> mask (H, W) uint8 for an image of `size` (width, height)."""
    coco = require("pycocotools.mask", "train")
    width, height = size
    try:
        if isinstance(segmentation, list):
            polygons = _valid_polygons(segmentation)
            if not polygons:
                return np.zeros((height, width), np.uint8)
            _check_polygons(polygons, width, height)
            rle = coco.merge(coco.frPyObjects(polygons, height, width))
        else:
            if tuple(segmentation["size"]) != (height, width):
                raise ValueError(f"expected run lengths of size {[height, width]}, got {segmentation['size']}")
            is_compressed = not isinstance(segmentation["counts"], list)
            _check_run_lengths(segmentation["counts"], width * height)
            rle = segmentation if is_compressed else coco.frPyObjects(segmentation, height, width)
        return coco.decode(rle)
    except Exception as error:  # pycocotools raises nothing more specific
        raise DataError(f"{file}, annotation {annotation_id}: invalid segmentation ({error}).") from error


def _check_polygons(polygons: list, width: int, height: int) -> None:
    """ValueError for values on which pycocotools crashes, or that make it allocate any amount of memory."""
    limit = MAX_EXTENT * (width + height)
    for polygon in polygons:
        points = np.array(polygon, np.float64).reshape(-1, 2)
        lengths = np.abs(points - np.roll(points, 1, axis=0)).sum()
        if not (np.abs(points).max() <= limit and lengths <= limit):  # also false for NaN
            raise ValueError(f"expected polygons near an image of {width} x {height} px, got {points.tolist()[:3]}")


def _check_run_lengths(counts: Any, pixels: int) -> None:
    """ValueError for run lengths that do not cover the image, or strings whose end pycocotools would read past."""
    if isinstance(counts, list):
        if not all(_is_integer(count) and 0 <= count <= pixels for count in counts) or sum(counts) != pixels:
            raise ValueError(f"expected run lengths whose sum is {pixels}")
    elif not re.fullmatch(r"(?:[P-o]{0,6}[0-O])*", counts if isinstance(counts, str) else counts.decode()):
        raise ValueError("expected compressed run lengths")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _valid_polygons(segmentation: list) -> list:
    """Polygons of at least three points; pycocotools would read four numbers as a box."""
    return [polygon for polygon in segmentation if len(polygon) >= 6]


def _index_categories(categories: list[dict], classes: list[str] | None, file: Path) -> tuple[list[str], list[int]]:
    """Names and ids, in the order of `classes` if given; classes that the file lacks get unused ids."""
    if invalid := [entry for entry in categories if not _is_integer(entry.get("id")) or "name" not in entry]:
        raise DataError(f"expected an integer id and a name for every category in {file}, got {invalid[0]}.")
    ordered = sorted(categories, key=lambda entry: entry["id"])
    ids = {str(entry["name"]): int(entry["id"]) for entry in ordered}
    if len(ids) != len(ordered) or not ids:
        raise DataError(f"expected unique category names in {file}, got {len(ids)} for {len(ordered)} categories.")
    if classes is None:
        return list(ids), list(ids.values())
    check_known_classes(set(ids), classes, str(file))
    unused = max(ids.values()) + 1
    return list(classes), [ids.get(name, unused + i) for i, name in enumerate(classes)]


def _index_by_id(entries: Iterable[dict], kind: str, file: Path) -> dict[int, dict]:
    indexed: dict[int, dict] = {}
    for entry in entries:
        if "id" not in entry:
            raise DataError(f"{file}: {kind} without id.")
        if not _is_integer(entry["id"]):
            raise DataError(f"{file}: expected an integer as {kind} id, got {entry['id']!r}.")
        if entry["id"] in indexed:
            raise DataError(f"{file}: duplicate {kind} id {entry['id']}.")
        indexed[entry["id"]] = entry
    return indexed


def _check_annotation(annotation: dict, images: dict[int, dict], labels: dict[int, int], file: Path) -> None:
    where = f"{file}, annotation {annotation['id']}"
    for key in ("image_id", "category_id"):
        if not _is_integer(annotation.get(key)):
            raise DataError(f"{where}: expected an integer as {key}, got {annotation.get(key)!r}.")
    if annotation.get("image_id") not in images:
        raise DataError(f"{where}: unknown image_id {annotation.get('image_id')}.")
    if annotation.get("category_id") not in labels:
        raise DataError(f"{where}: unknown category_id {annotation.get('category_id')}.")
    box = annotation.get("bbox")
    if (
        not isinstance(box, list)
        or len(box) != 4
        or not all(isinstance(v, (int, float)) and abs(v) < 1e9 for v in box)  # false for NaN
    ):
        raise DataError(f"{where}: expected bbox as x, y, width, height, got {box!r}.")
    if annotation.get("iscrowd", 0) not in (0, 1):
        raise DataError(f"{where}: expected iscrowd 0 or 1, got {annotation['iscrowd']!r}.")
    segmentation = annotation.get("segmentation")
    is_polygons = isinstance(segmentation, list) and all(isinstance(polygon, list) for polygon in segmentation)
    if segmentation is not None and not is_polygons and not isinstance(segmentation, dict):
        raise DataError(f"{where}: expected polygons or run lengths as segmentation, got {segmentation!r}.")


def _compact(annotation: dict, labels: dict[int, int]) -> dict[str, Any]:
    """The fields that `objects` needs."""
    return {
        "id": annotation["id"],
        "bbox": annotation["bbox"],
        "label": labels[annotation["category_id"]],
        "iscrowd": annotation.get("iscrowd", 0),
        "segmentation": annotation.get("segmentation"),
    }


def _area(annotation: dict, size: tuple[int | None, int | None], file: Path) -> float:
    if annotation.get("segmentation") and size[0] and size[1]:
        return float(render_mask(annotation["segmentation"], (size[0], size[1]), annotation["id"], file).sum())
    return float(annotation["bbox"][2] * annotation["bbox"][3])
