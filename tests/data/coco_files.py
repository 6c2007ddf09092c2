"""A small COCO set on disk, with everything that such sets have: gaps, crowds, an empty picture, odd boxes."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pycocotools import mask as coco_mask

MINI = Path(__file__).parent / "nuclei-mini"
WIDTH, HEIGHT = 40, 30
SQUARE = [[5, 5, 15, 5, 15, 15, 5, 15]]  # a polygon of 10 x 10 px


def run_lengths(mask: np.ndarray) -> list[int]:
    """Uncompressed: down the columns, zeros first."""
    flat = mask.T.flatten()
    edges = np.flatnonzero(np.diff(flat)) + 1
    lengths = np.diff([0, *edges.tolist(), len(flat)]).tolist()
    return lengths if flat[0] == 0 else [0, *lengths]


def half() -> np.ndarray:
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[10:20, 20:40] = 1
    return mask


def document() -> dict[str, Any]:
    compressed = coco_mask.encode(np.asfortranarray(half()))
    return {
        "images": [
            {"id": 10, "file_name": "a.png", "width": WIDTH, "height": HEIGHT},
            {"id": 30, "file_name": "empty.png", "width": WIDTH, "height": HEIGHT},
            {"id": 20, "file_name": "b.png", "width": WIDTH, "height": HEIGHT},
        ],
        "annotations": [
            note(1, 10, 90, [5, 5, 10, 10], SQUARE),
            note(2, 10, 7, [20, 10, 20, 10], {"size": [HEIGHT, WIDTH], "counts": run_lengths(half())}),
            note(3, 10, 1, [20, 10, 20, 10], {"size": [HEIGHT, WIDTH], "counts": compressed["counts"].decode()}),
            note(4, 10, 1, [0, 0, 40, 30], {"size": [HEIGHT, WIDTH], "counts": run_lengths(half())}, iscrowd=1),
            note(5, 20, 1, [-10, 5, 20, 10], [[-10, 5, 10, 5, 10, 15, -10, 15]]),  # half outside
            note(6, 20, 7, [50, 5, 10, 10], [[50, 5, 60, 5, 60, 15, 50, 15]]),  # outside
            note(7, 20, 7, [5, 5, 0, 10], [[5, 5, 5, 15]]),  # a line
        ],
        "categories": [{"id": 7, "name": "dog"}, {"id": 1, "name": "cat"}, {"id": 90, "name": "bird"}],
    }


def note(number: int, image: int, category: int, box: list[float], shape: Any, iscrowd: int = 0) -> dict[str, Any]:
    return {
        "id": number,
        "image_id": image,
        "category_id": category,
        "bbox": box,
        "segmentation": shape,
        "iscrowd": iscrowd,
        "area": float(abs(box[2] * box[3])),
    }


def write(folder: Path, change=None, file: str = "annotations/instances_train.json", images: str = "train") -> Path:
    """The set in `folder`, its document changed by `change`; gives the JSON's path."""
    found = copy.deepcopy(document())
    if change is not None:
        change(found)
    path, where = folder / file, folder / images
    path.parent.mkdir(parents=True, exist_ok=True)
    where.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))
    for about in found["images"]:
        Image.new("RGB", (WIDTH, HEIGHT), (about["id"], 0, 0)).save(where / about["file_name"])
    return path
