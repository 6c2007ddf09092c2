"""Objects in COCO's JSON: polygons, run lengths, crowds, pictures without any object, gaps in the numbers."""

import json
import logging
import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from saccade._extras import require
from saccade.data.decode.image import BadImage, read_image
from saccade.data.sources.base import DataError
from saccade.data.sources.objects import Objects

_logger = logging.getLogger(__name__)


class CocoSource:
    """`annotations` is the JSON file, `images` the folder its file names start from.

    Labels are the places of the categories in the order of their ids, or in that of `classes`, from 1. Pictures that
    are not on disk are left out and told; if none is there, the folder is wrong and that is an error. A broken
    annotation is an error that names it; a box without area or outside its picture is not (see `objects.learnable`).
    """

    def __init__(self, annotations: str | Path, images: str | Path, classes: list[str] | None = None):
        self.file, self.root = Path(annotations), Path(images)
        found = read_json(self.file)
        self.classes, self.category_ids = _categories(found["categories"], classes, self.file)
        labels = {number: i + 1 for i, number in enumerate(self.category_ids)}
        about = _by_id(found["images"], "image", self.file)
        notes: dict[int, list[dict]] = {image_id: [] for image_id in about}
        for note in _by_id(found["annotations"], "annotation", self.file).values():
            _check(note, about, labels, self.file)
            notes[note["image_id"]].append(note)
        kept = self._on_disk(about, notes)
        self.image_ids = np.array(kept, dtype=np.int64)
        self.paths = [about[image_id]["file_name"] for image_id in kept]
        self.sizes = [(about[image_id].get("width"), about[image_id].get("height")) for image_id in kept]
        shaped = [bool(note.get("segmentation")) for image_id in kept for note in notes[image_id]]
        self.has_masks = bool(shaped) and all(shaped)
        # Pickled and end to end in one array: loader processes that are forked then share it instead of copying.
        packed = [pickle.dumps([_essence(note, labels) for note in notes[image_id]]) for image_id in kept]
        self._ends = np.cumsum([0] + [len(one) for one in packed])
        self._notes = np.frombuffer(b"".join(packed), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> Image.Image:
        image, expected = read_image(self.root / self.paths[index]), self.sizes[index]
        if None not in expected and image.size != expected:
            raise BadImage(self.name(index), f"{image.size} px, but {self.file.name} says {expected}")
        return image

    def name(self, index: int) -> str:
        return str(self.root / self.paths[index])

    def objects(self, index: int, size: tuple[int, int]) -> Objects:
        notes = pickle.loads(self._notes[self._ends[index] : self._ends[index + 1]].tobytes())
        boxes = np.array([note["bbox"] for note in notes], np.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        masks = None
        if self.has_masks:
            drawn = [draw(note["segmentation"], size, note["id"], self.file) for note in notes]
            masks = np.stack(drawn) if drawn else np.zeros((0, size[1], size[0]), np.uint8)
        labels, crowd, ids = ([note[key] for note in notes] for key in ("label", "iscrowd", "id"))
        return Objects(boxes, np.array(labels, np.int64), masks, np.array(crowd, bool), np.array(ids, np.int64))

    def ground_truth(self) -> dict[str, Any]:
        """The file itself, less the pictures that are not there, with what pycocotools cannot do without.

        Areas and crowd marks are filled in where they lack; polygons of less than three points are left out.
        """
        found, kept = read_json(self.file), set(self.image_ids.tolist())
        images = [about for about in found["images"] if about["id"] in kept]
        sizes = {about["id"]: (about.get("width"), about.get("height")) for about in images}
        notes = [note for note in found["annotations"] if note["image_id"] in kept]
        for note in notes:
            note.setdefault("iscrowd", 0)
            if isinstance(note.get("segmentation"), list):
                note["segmentation"] = _polygons(note["segmentation"]) or [[0.0] * 6]  # a point: no area
            if "area" not in note:
                note["area"] = _area(note, sizes[note["image_id"]], self.file)
        return {"images": images, "annotations": notes, "categories": found["categories"]}

    def _on_disk(self, about: dict[int, dict], notes: dict[int, list[dict]]) -> list[int]:
        """Ids of the pictures that are there, in the order of the file."""
        there: dict[str, set[str]] = {}
        kept, missing = [], []
        for image_id, entry in about.items():
            folder, name = os.path.split(os.path.join(self.root, entry["file_name"]))
            if folder not in there:
                there[folder] = set(os.listdir(folder)) if os.path.isdir(folder) else set()
            (kept if name in there[folder] else missing).append(image_id)
        if not missing:
            return kept
        first = missing[0]
        note = f", annotation {notes[first][0]['id']}" if notes[first] else ""
        example = f"{os.path.join(self.root, about[first]['file_name'])} (image {first}{note})"
        if not kept:
            raise DataError(f"none of the {len(missing)} pictures of {self.file} is in {self.root}, such as {example}.")
        _logger.warning(
            "%d of %d pictures of %s are missing and left out, such as %s", len(missing), len(about), self.file, example
        )
        return kept


def read_json(file: Path) -> dict[str, Any]:
    """COCO's file, with its three lists."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    lacking = (
        [key for key in ("images", "annotations", "categories") if key not in found]
        if isinstance(found, dict)
        else ["images"]
    )
    if lacking:
        raise DataError(f"{file} is no COCO annotation file: it has no {', '.join(lacking)}.")
    return found


def draw(shape: Any, size: tuple[int, int], number: int, file: Path) -> np.ndarray:
    """A segmentation, polygons or run lengths, as a mask (H, W) uint8 of a picture of `size` (width, height)."""
    coco = require("pycocotools.mask", "train")
    width, height = size
    try:
        if isinstance(shape, list):
            polygons = _polygons(shape)
            if not polygons:
                return np.zeros((height, width), np.uint8)
            code = coco.merge(coco.frPyObjects(polygons, height, width))
        else:
            if tuple(shape["size"]) != (height, width):
                raise ValueError(f"run lengths of {shape['size']}, the picture has {[height, width]}")
            code = coco.frPyObjects(shape, height, width) if isinstance(shape["counts"], list) else shape
        return coco.decode(code)
    except Exception as error:  # pycocotools raises nothing more specific
        raise DataError(f"{file}, annotation {number}: its segmentation cannot be drawn ({error}).") from error


def _polygons(shape: list) -> list:
    """Less than a triangle has no area, and pycocotools takes four numbers for a box."""
    return [points for points in shape if len(points) >= 6]


def _categories(categories: list[dict], classes: list[str] | None, file: Path) -> tuple[list[str], list[int]]:
    """Names and ids; with `classes`, in their order, and a number of its own for a class that this file has not."""
    ordered = sorted(categories, key=lambda entry: entry["id"])
    ids = {str(entry["name"]): int(entry["id"]) for entry in ordered}
    if len(ids) != len(ordered) or not ids:
        raise DataError(f"{file} has {len(ordered)} categories with {len(ids)} names: expected one name each.")
    if classes is None:
        return list(ids), list(ids.values())
    if unknown := [name for name in ids if name not in classes]:
        raise DataError(f"{file} has categories the training set has not: {', '.join(unknown[:5])}.")
    unused = max(ids.values()) + 1
    return list(classes), [ids.get(name, unused + i) for i, name in enumerate(classes)]


def _by_id(entries: Iterable[dict], kind: str, file: Path) -> dict[int, dict]:
    found: dict[int, dict] = {}
    for entry in entries:
        if "id" not in entry or entry["id"] in found:
            raise DataError(
                f"{file}: {kind} {entry.get('id')} is there twice." if "id" in entry else f"{file}: {kind} without id."
            )
        found[entry["id"]] = entry
    return found


def _check(note: dict, images: dict[int, dict], labels: dict[int, int], file: Path) -> None:
    """One annotation; the message names it."""
    where = f"{file}, annotation {note['id']}"
    if note.get("image_id") not in images:
        raise DataError(f"{where}: there is no image {note.get('image_id')}.")
    if note.get("category_id") not in labels:
        raise DataError(f"{where}: there is no category {note.get('category_id')}.")
    box = note.get("bbox")
    if (
        not isinstance(box, list)
        or len(box) != 4
        or not all(isinstance(v, (int, float)) and np.isfinite(v) for v in box)
    ):
        raise DataError(f"{where}: expected bbox as x, y, width, height, got {box!r}.")


def _essence(note: dict, labels: dict[int, int]) -> dict[str, Any]:
    return {
        "id": note["id"],
        "bbox": note["bbox"],
        "label": labels[note["category_id"]],
        "iscrowd": note.get("iscrowd", 0),
        "segmentation": note.get("segmentation"),
    }


def _area(note: dict, size: tuple[int | None, int | None], file: Path) -> float:
    if note.get("segmentation") and size[0] and size[1]:
        return float(draw(note["segmentation"], (size[0], size[1]), note["id"], file).sum())
    return float(note["bbox"][2] * note["bbox"][3])
