"""Labelled images for scoring token maps: masks of classes or objects, boxes, or both."""

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from saccade._extras import require
from saccade.data.decode.image import IMAGE_SUFFIXES, read_image, read_mask_values
from saccade.data.open.splits import EMBEDDED_IMAGES
from saccade.data.synthetic.scenes import Scenes
from saccade.explain.images import load_image
from saccade.explain.scores.superpixels import IGNORE

MASKS = ("annotations", "masks", "labels", "annotation", "mask")
COLUMNS = ("annotation", "mask", "segmentation", "instance_mask")
FULL_SIZE = 1 << 16  # longer side: image and ground truth are not downscaled
VOID = 255  # unlabelled pixels in 8-bit class masks, by convention


class Sample(NamedTuple):
    """One image with its ground truth."""

    name: str
    image: Image.Image
    mask: np.ndarray | None  # (H, W) int32, IGNORE where unlabelled
    boxes: np.ndarray | None  # (n, 4), x0 y0 x1 y1 in pixels


class Entry(NamedTuple):
    """A sample that is read on demand, so that a bad one can be skipped."""

    name: str
    read: Callable[[], Sample]  # ValueError for a bad sample


def read_labelled(path: str | os.PathLike) -> Iterator[Entry]:
    """Entries of a Parquet file or folder, a COCO JSON with its images, image and mask folders, or "scenes"."""
    if str(path) == EMBEDDED_IMAGES:
        return _scenes()
    path = Path(path)
    if not path.exists():
        raise ValueError(f"no such data: {path}")
    if path.suffix == ".json":
        return _coco(path)
    if path.suffix == ".parquet" or (path.is_dir() and any(path.glob("*.parquet"))):
        return _parquet([path] if path.is_file() else sorted(path.glob("*.parquet")))
    if path.is_dir():
        return _folders(path)
    raise ValueError(f"expected a Parquet file, a COCO JSON or a folder with images/ and annotations/, got {path}.")


def _scenes() -> Iterator[Entry]:
    """The embedded rendered scenes, with objects as masks and boxes."""
    scenes = Scenes(count=1000, size=128, split="val")

    def read(index: int) -> Sample:
        frame = scenes.frame(index)
        objects = frame.instances.astype(np.int32)
        return Sample(f"scene {index}", Image.fromarray(frame.image), objects, frame.boxes.astype(float))

    return (Entry(f"scene {index}", partial(read, index)) for index in range(len(scenes)))


def _folders(root: Path) -> Iterator[Entry]:
    masks = next((root / name for name in MASKS if (root / name).is_dir()), None)
    if not (root / "images").is_dir() or masks is None:
        raise ValueError(f"expected a folder images/ and one of {', '.join(name + '/' for name in MASKS)} in {root}.")
    mask_files = {path.relative_to(masks).with_suffix(""): path for path in sorted(masks.rglob("*.png"))}
    images = [path for path in sorted((root / "images").rglob("*")) if path.suffix.lower() in IMAGE_SUFFIXES]
    if not images:
        raise ValueError(f"expected images in {root / 'images'}, got none.")

    def read(path: Path) -> Sample:
        key = path.relative_to(root / "images").with_suffix("")
        if key not in mask_files:
            raise ValueError(f"{path} has no mask {masks / key}.png")
        image = load_image(path, FULL_SIZE)
        return Sample(path.name, image, _mask(mask_files[key].read_bytes(), image, str(mask_files[key])), None)

    return (Entry(path.name, partial(read, path)) for path in images)


def _parquet(files: list[Path]) -> Iterator[Entry]:
    parquet = require("pyarrow.parquet", "train")

    def read(name: str, record: dict[str, Any], mask_column: str | None) -> Sample:
        image = load_image(read_image(_bytes(record["image"], name), name), FULL_SIZE)
        mask = boxes = None
        if mask_column:
            void = None if mask_column == "instance_mask" else VOID
            mask = _mask(_bytes(record[mask_column], name), image, name, void)
        if record.get("objects"):
            boxes = _corners(record["objects"]["bbox"])
        return Sample(name, image, mask, boxes)

    for file in files:
        names = parquet.read_schema(file).names
        mask_column = next((name for name in COLUMNS if name in names), None)
        if "image" not in names or (mask_column is None and "objects" not in names):
            raise ValueError(
                f"expected a column image and one of {', '.join(COLUMNS)}, objects in {file}, got {names}."
            )
        row = 0
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=8):
            for record in batch.to_pylist():
                name = f"{file.name} row {row}"
                yield Entry(name, partial(read, name, record, mask_column))
                row += 1


def _coco(path: Path) -> Iterator[Entry]:
    try:
        document = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict) or "images" not in document or "annotations" not in document:
        raise ValueError(f"expected a COCO file with images and annotations, got {path}.")
    by_image: dict[Any, list[dict]] = {}
    for annotation in document["annotations"]:
        by_image.setdefault(annotation["image_id"], []).append(annotation)

    def read(record: dict[str, Any]) -> Sample:
        image = load_image(_find(path, record["file_name"]), FULL_SIZE)
        objects = by_image.get(record["id"], [])
        mask = np.zeros((image.height, image.width), dtype=np.int32)
        for annotation in objects:
            if annotation.get("segmentation"):
                area = _area(annotation["segmentation"], image.height, image.width)
                mask[area] = IGNORE if annotation.get("iscrowd") else annotation["category_id"]
        single = [annotation["bbox"] for annotation in objects if not annotation.get("iscrowd")]
        has_masks = any(annotation.get("segmentation") for annotation in objects)
        return Sample(record["file_name"], image, mask if has_masks else None, _corners(single))

    return (Entry(record["file_name"], partial(read, record)) for record in document["images"])


def _find(path: Path, name: str) -> Path:
    """Path of a COCO file's image: beside the file, or in the folder of its split (instances_val.json and val/)."""
    split = path.stem.partition("_")[2].split("_")[0]
    folders = [path.parent, path.parent.parent / split, path.parent.parent, path.parent.parent / "images"]
    folders.append(path.parent.parent / "images" / split)
    file = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if file is None:
        searched = ", ".join(str(folder) for folder in folders)
        raise ValueError(f"expected {name} of {path} in one of {searched}, got no such file.")
    return file


def _area(segmentation: Any, height: int, width: int) -> np.ndarray:
    """Pixels of a COCO polygon or run-length encoding, (height, width)."""
    mask = require("pycocotools.mask", "train")
    if isinstance(segmentation, dict) and isinstance(segmentation["counts"], list):
        segmentation = mask.frPyObjects(segmentation, height, width)
    elif isinstance(segmentation, list):
        segmentation = mask.merge(mask.frPyObjects(segmentation, height, width))
    return mask.decode(segmentation).astype(bool)


def _mask(data: bytes, image: Image.Image, name: str, void: int | None = VOID) -> np.ndarray:
    """A mask file as int32, with IGNORE in place of `void`."""
    values = read_mask_values(data, name)
    if values.shape != (image.height, image.width):
        raise ValueError(f"expected a mask of {(image.height, image.width)}, got {values.shape} for {name}.")
    values = values.astype(np.int32)
    if void is not None:
        values[values == void] = IGNORE
    return values


def _bytes(cell: Any, name: str) -> bytes:
    """The encoded image of a Parquet cell: bytes, or a struct with a field bytes."""
    data = cell.get("bytes") if isinstance(cell, dict) else cell
    if not isinstance(data, bytes):
        raise ValueError(f"{name}: expected an encoded image, got {type(data).__name__}.")
    return data


def _corners(boxes: Any) -> np.ndarray:
    """COCO's x y width height -> x0 y0 x1 y1."""
    boxes = np.array(boxes, dtype=float).reshape(-1, 4)
    return np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1)
