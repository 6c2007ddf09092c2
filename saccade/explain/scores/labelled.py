"""Pictures with a known truth, to score maps by: masks of classes or objects, boxes, or both."""

import io
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from saccade._extras import require
from saccade.data.open import EMBEDDED
from saccade.data.scenes import Scenes
from saccade.explain.images import load_picture
from saccade.explain.scores.superpixels import IGNORE

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
MASKS = ("annotations", "masks", "labels", "annotation", "mask")
COLUMNS = ("annotation", "mask", "segmentation", "instance_mask")
WHOLE = 1 << 16  # pixels of the longer side: truth and picture keep their size
VOID = 255  # in 8-bit masks of classes, by convention


class Sample(NamedTuple):
    name: str
    picture: Image.Image
    mask: np.ndarray | None  # (H, W) int32, IGNORE where unknown
    boxes: np.ndarray | None  # (n, 4), x0 y0 x1 y1 in pixels


class Entry(NamedTuple):
    """A sample that is read when it is asked for, so that a bad one can be left out."""

    name: str
    read: Callable[[], Sample]  # ValueError says what is wrong with it


def read_labelled(path: str | Path) -> Iterator[Entry]:
    """Entries of a Parquet file or folder, of a COCO JSON with its images, of image and mask folders, or "scenes"."""
    if str(path) == EMBEDDED:
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
    raise ValueError(f"{path}: expected a Parquet file, a COCO JSON, or a folder with images/ and annotations/.")


def _scenes() -> Iterator[Entry]:
    """The embedded set: rendered scenes, their objects as masks and boxes."""
    scenes = Scenes(count=1000, size=128, split="val")

    def read(index: int) -> Sample:
        frame = scenes.frame(index)
        objects = frame.instances.astype(np.int32)
        return Sample(f"scene {index}", Image.fromarray(frame.image), objects, frame.boxes.astype(float))

    return (Entry(f"scene {index}", partial(read, index)) for index in range(len(scenes)))


def _folders(root: Path) -> Iterator[Entry]:
    masks = next((root / name for name in MASKS if (root / name).is_dir()), None)
    if not (root / "images").is_dir() or masks is None:
        raise ValueError(f"{root} needs a folder images/ and one of {', '.join(name + '/' for name in MASKS)}.")
    found = {path.relative_to(masks).with_suffix(""): path for path in sorted(masks.rglob("*.png"))}
    pictures = [path for path in sorted((root / "images").rglob("*")) if path.suffix.lower() in IMAGES]
    if not pictures:
        raise ValueError(f"{root / 'images'} holds no images.")

    def read(path: Path) -> Sample:
        key = path.relative_to(root / "images").with_suffix("")
        if key not in found:
            raise ValueError(f"{path} has no mask {masks / key}.png")
        picture = load_picture(path, WHOLE)
        return Sample(path.name, picture, _mask(found[key].read_bytes(), picture, str(found[key])), None)

    return (Entry(path.name, partial(read, path)) for path in pictures)


def _parquet(files: list[Path]) -> Iterator[Entry]:
    parquet = require("pyarrow.parquet", "train")

    def read(name: str, record: dict[str, Any], mask_column: str | None) -> Sample:
        picture = load_picture(_decode(record["image"], name), WHOLE)
        mask = boxes = None
        if mask_column:
            void = None if mask_column == "instance_mask" else VOID
            mask = _mask(_bytes(record[mask_column]), picture, name, void)
        if record.get("objects"):
            boxes = _corners(record["objects"]["bbox"])
        return Sample(name, picture, mask, boxes)

    for file in files:
        names = parquet.read_schema(file).names
        mask_column = next((name for name in COLUMNS if name in names), None)
        if "image" not in names or (mask_column is None and "objects" not in names):
            raise ValueError(f"{file} needs a column image, and {', '.join(COLUMNS)} or objects; it has {names}.")
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
        raise ValueError(f"{path} is not a COCO file: it needs images and annotations.")
    by_image: dict[Any, list[dict]] = {}
    for annotation in document["annotations"]:
        by_image.setdefault(annotation["image_id"], []).append(annotation)

    def read(image: dict[str, Any]) -> Sample:
        picture = load_picture(_find(path, image["file_name"]), WHOLE)
        objects = by_image.get(image["id"], [])
        mask = np.zeros((picture.height, picture.width), dtype=np.int32)
        for annotation in objects:
            if annotation.get("segmentation"):
                where = _area(annotation["segmentation"], picture.height, picture.width)
                mask[where] = IGNORE if annotation.get("iscrowd") else annotation["category_id"]
        single = [annotation["bbox"] for annotation in objects if not annotation.get("iscrowd")]
        has_masks = any(annotation.get("segmentation") for annotation in objects)
        return Sample(image["file_name"], picture, mask if has_masks else None, _corners(single))

    return (Entry(image["file_name"], partial(read, image)) for image in document["images"])


def _find(path: Path, name: str) -> Path:
    """Where a COCO file's images lie: beside it, or in the folder of its split, as in instances_val.json and val/."""
    split = path.stem.partition("_")[2].split("_")[0]
    places = [path.parent, path.parent.parent / split, path.parent.parent, path.parent.parent / "images"]
    places.append(path.parent.parent / "images" / split)
    found = next((place / name for place in places if (place / name).is_file()), None)
    if found is None:
        raise ValueError(f"{path} names {name}, which is not in any of {', '.join(str(place) for place in places)}.")
    return found


def _area(segmentation: Any, height: int, width: int) -> np.ndarray:
    mask = require("pycocotools.mask", "train")
    if isinstance(segmentation, dict) and isinstance(segmentation["counts"], list):
        segmentation = mask.frPyObjects(segmentation, height, width)
    elif isinstance(segmentation, list):
        segmentation = mask.merge(mask.frPyObjects(segmentation, height, width))
    return mask.decode(segmentation).astype(bool)


def _mask(data: bytes, picture: Image.Image, name: str, void: int | None = VOID) -> np.ndarray:
    values = np.array(_decode({"bytes": data}, name))
    if values.ndim != 2:
        raise ValueError(f"the mask of {name} has colours; expected one channel whose values are the classes.")
    if values.shape != (picture.height, picture.width):
        raise ValueError(f"the mask of {name} is {values.shape}, its image {(picture.height, picture.width)}.")
    values = values.astype(np.int32)
    if void is not None:
        values[values == void] = IGNORE
    return values


def _bytes(cell: Any) -> bytes:
    return cell["bytes"] if isinstance(cell, dict) else cell


def _decode(cell: Any, name: str) -> Image.Image:
    try:
        picture = Image.open(io.BytesIO(_bytes(cell)))
        picture.load()
    except (UnidentifiedImageError, OSError, TypeError, Image.DecompressionBombError) as error:
        raise ValueError(f"{name} holds no readable image: {error}") from error
    return picture


def _corners(boxes: Any) -> np.ndarray:
    """COCO's x y width height -> x0 y0 x1 y1."""
    boxes = np.array(boxes, dtype=float).reshape(-1, 4)
    return np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1)
