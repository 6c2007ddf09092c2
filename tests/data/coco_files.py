"""A small COCO dataset on disk with ids with gaps, a crowd, an image without objects and invalid boxes."""

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
    """Uncompressed run lengths: column by column, starting with zeros."""
    flat = mask.T.flatten()
    edges = np.flatnonzero(np.diff(flat)) + 1
    lengths = np.diff([0, *edges.tolist(), len(flat)]).tolist()
    return lengths if flat[0] == 0 else [0, *lengths]


def half_mask() -> np.ndarray:
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[10:20, 20:40] = 1
    return mask


def document() -> dict[str, Any]:
    compressed = coco_mask.encode(np.asfortranarray(half_mask()))
    return {
        "images": [
            {"id": 10, "file_name": "a.png", "width": WIDTH, "height": HEIGHT},
            {"id": 30, "file_name": "empty.png", "width": WIDTH, "height": HEIGHT},
            {"id": 20, "file_name": "b.png", "width": WIDTH, "height": HEIGHT},
        ],
        "annotations": [
            annotation(1, 10, 90, [5, 5, 10, 10], SQUARE),
            annotation(2, 10, 7, [20, 10, 20, 10], {"size": [HEIGHT, WIDTH], "counts": run_lengths(half_mask())}),
            annotation(3, 10, 1, [20, 10, 20, 10], {"size": [HEIGHT, WIDTH], "counts": compressed["counts"].decode()}),
            annotation(
                4, 10, 1, [0, 0, 40, 30], {"size": [HEIGHT, WIDTH], "counts": run_lengths(half_mask())}, iscrowd=1
            ),
            annotation(5, 20, 1, [-10, 5, 20, 10], [[-10, 5, 10, 5, 10, 15, -10, 15]]),  # half outside
            annotation(6, 20, 7, [50, 5, 10, 10], [[50, 5, 60, 5, 60, 15, 50, 15]]),  # outside
            annotation(7, 20, 7, [5, 5, 0, 10], [[5, 5, 5, 15]]),  # a line
        ],
        "categories": [{"id": 7, "name": "dog"}, {"id": 1, "name": "cat"}, {"id": 90, "name": "bird"}],
    }


def annotation(
    annotation_id: int, image: int, category: int, box: list[float], segmentation: Any, iscrowd: int = 0
) -> dict[str, Any]:
    return {
        "id": annotation_id,
        "image_id": image,
        "category_id": category,
        "bbox": box,
        "segmentation": segmentation,
        "iscrowd": iscrowd,
        "area": float(abs(box[2] * box[3])),
    }


def write(folder: Path, change=None, file: str = "annotations/instances_train.json", images: str = "train") -> Path:
    """Write the dataset, its document changed by `change`, and return the path of the JSON file."""
    content = copy.deepcopy(document())
    if change is not None:
        change(content)
    path, image_folder = folder / file, folder / images
    path.parent.mkdir(parents=True, exist_ok=True)
    image_folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    for entry in content["images"]:
        Image.new("RGB", (WIDTH, HEIGHT), (entry["id"], 0, 0)).save(image_folder / entry["file_name"])
    return path
