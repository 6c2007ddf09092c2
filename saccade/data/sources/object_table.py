"""Objects in Parquet, as Hugging Face has them: a struct of equally long lists, perhaps a picture of instances."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from saccade.data.decode.image import DECODE_ERRORS, read_image
from saccade.data.sources.base import DataError
from saccade.data.sources.objects import Objects, write_coco
from saccade.data.sources.table import EncodedColumn, _choose, _features, _read, _schema

CATEGORY_NAMES = ("category", "label", "category_id", "labels")


class TableObjects:
    """Columns: an image; `objects` with lists `bbox` (x, y, width, height) and `category`, perhaps `id` and `iscrowd`;
    perhaps `image_id` and `instance_mask`, a picture of one channel in which k marks object k - 1 of the lists.
    """

    def __init__(self, files: Sequence[str | Path], image_column: str | None = None, classes: list[str] | None = None):
        self.files = [str(file) for file in files]
        schema = _schema(self.files[0])
        if "objects" not in schema.names:
            raise DataError(f"{self.files[0]} has no column `objects`: expected a struct with bbox and category.")
        features = _features(schema)
        self._images = EncodedColumn(self.files, _choose(schema, features, "image", image_column))
        self._objects = _read(self.files, "objects").combine_chunks()
        fields = [field.name for field in self._objects.type]
        self._category = next((name for name in CATEGORY_NAMES if name in fields), None)
        if "bbox" not in fields or self._category is None:
            raise DataError(f"{self.files[0]}: objects need bbox and category, they have {', '.join(fields)}.")
        self.classes = self._class_names(features.get("objects", {}), classes)
        self.category_ids = list(range(len(self.classes)))
        self.has_masks = "instance_mask" in schema.names
        self._masks = EncodedColumn(self.files, "instance_mask")
        ids = _read(self.files, "image_id").to_numpy() if "image_id" in schema.names else np.arange(len(self))
        self.image_ids = ids.astype(np.int64)
        if len(np.unique(self.image_ids)) != len(self):
            raise DataError(f"{self.files[0]}: image_id is not unique.")

    def __len__(self) -> int:
        return len(self._objects)

    def read(self, index: int) -> Image.Image:
        return read_image(*self._images.encoded(index))

    def name(self, index: int) -> str:
        return self._images.name(index)

    def objects(self, index: int, size: tuple[int, int]) -> Objects:
        row = self._objects[index].as_py()
        boxes = np.array(row["bbox"], np.float32).reshape(-1, 4)
        if not np.isfinite(boxes).all():
            raise DataError(
                f"{self.name(index)}: object {int(np.argmin(np.isfinite(boxes).all(1)))} has no finite box."
            )
        boxes[:, 2:] += boxes[:, :2]
        labels = np.array(row[self._category], np.int64) + 1
        wrong = np.flatnonzero((labels < 1) | (labels > len(self.classes)))
        if len(wrong):
            got = int(labels[wrong[0]]) - 1
            raise DataError(f"{self.name(index)}: object {wrong[0]} has category {got} of {len(self.classes)}.")
        ids = np.array(row["id"] if row.get("id") is not None else range(len(boxes)), np.int64)
        crowd = np.array(row["iscrowd"] if row.get("iscrowd") is not None else [0] * len(boxes), bool)
        return Objects(boxes, labels, self._drawn(index, len(boxes), size), crowd, ids)

    def ground_truth(self) -> dict[str, Any]:
        return write_coco(self)

    def _drawn(self, index: int, count: int, size: tuple[int, int]) -> np.ndarray | None:
        if not self.has_masks:
            return None
        try:
            data, _ = self._masks.encoded(index)
            with Image.open(io.BytesIO(data) if isinstance(data, bytes) else data) as picture:
                instances = np.asarray(picture)
        except DECODE_ERRORS as error:
            raise DataError(f"{self.name(index)}: its instance_mask cannot be read ({error}).") from error
        if instances.shape != size[::-1] or int(instances.max(initial=0)) > count:
            raise DataError(
                f"{self.name(index)}: the instance_mask is {instances.shape} and counts to {instances.max(initial=0)}, "
                f"the picture is {size[::-1]} and has {count} objects."
            )
        return (instances == np.arange(1, count + 1, dtype=instances.dtype)[:, None, None]).astype(np.uint8)

    def _class_names(self, feature: Any, classes: list[str] | None) -> list[str]:
        """Of the metadata, of the other split, or the numbers themselves."""
        about = feature.get(self._category, {}) if isinstance(feature, dict) else {}
        names = (about.get("feature") or {}).get("names") if isinstance(about, dict) else None
        if names is None:
            values = self._objects.field(self._category).flatten().to_numpy(zero_copy_only=False)
            names = classes or [str(i) for i in range(int(values.max(initial=-1)) + 1)]
        if classes is not None and list(names) != classes:
            raise DataError(
                f"{self.files[0]} has classes {', '.join(names[:5])}, the training set {', '.join(classes[:5])}."
            )
        return list(names)
