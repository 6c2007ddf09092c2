"""Images with masks or objects for scoring token maps, read through `saccade.data`."""

import os
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from saccade.data.open import find_mask_splits, find_object_splits, open_split
from saccade.data.sources.base import DataError
from saccade.data.sources.masks import IGNORE as UNLABELLED
from saccade.data.sources.masks import read_pair
from saccade.explanation.scores.superpixels import IGNORE

SCENES = 8000  # training scenes of the embedded set, of which an eighth is for evaluation


class Sample(NamedTuple):
    """One image with its ground truth."""

    name: str
    image: Image.Image
    mask: np.ndarray | None  # (H, W) int32, IGNORE where unlabelled
    boxes: np.ndarray | None  # (n, 4), x0 y0 x1 y1 in pixels


def open_ground_truth(path: str | os.PathLike) -> Any:
    """The evaluation split of a dataset with objects, else with masks."""
    problems = []
    for find in (find_object_splits, find_mask_splits):
        try:
            return open_split(os.fspath(path), find=find, scenes=SCENES)
        except DataError as error:
            problems.append(str(error))
    raise DataError(f"expected images with objects or masks at {path}. {' '.join(problems)}")


def read_sample(source: Any, index: int) -> Sample:
    """Image `index` with its classes as mask, or with a number per object and its boxes; without crowds."""
    name = os.path.basename(source.name(index))
    if not hasattr(source, "image_ids"):
        image, labels = read_pair(source, index)
        return Sample(name, image, np.where(labels == UNLABELLED, IGNORE, labels.astype(np.int32)), None)
    image = source.read(index)
    objects, mask = source.objects(index, image.size), None
    if objects.masks is not None:
        mask = np.zeros((image.height, image.width), np.int32)
        for number, (area, crowd) in enumerate(zip(objects.masks, objects.crowd, strict=True), 1):
            mask[area > 0] = IGNORE if crowd else number
    return Sample(name, image, mask, objects.boxes[~objects.crowd].astype(float))
