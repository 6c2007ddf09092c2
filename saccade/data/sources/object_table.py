"""Objects in Parquet files (Hugging Face convention): a struct of lists per image, optionally an instance mask."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from saccade.data.decode.image import BadImage, read_image, read_mask_values
from saccade.data.sources.base import DataError
from saccade.data.sources.objects import Objects, to_coco
from saccade.data.sources.table import EncodedColumn, choose_column, read_column, read_features, read_schema

CATEGORY_FIELDS = ("category", "label", "category_id", "labels")


class ObjectTable:
    """Rows with an image and its objects.

    Columns: an image; `objects` with lists `bbox` (x, y, width, height) and `category`, optionally `id` and `iscrowd`;
    optionally `image_id`, and `instance_mask`, a one-channel image in which k marks object k - 1 of the lists.
    """

    def __init__(self, files: Sequence[str | Path], image_column: str | None = None, classes: list[str] | None = None):
        self.files = [str(file) for file in files]
        schema = read_schema(self.files[0])
        if "objects" not in schema.names:
            raise DataError(f"expected a column `objects` with bbox and category in {self.files[0]}, got none.")
        self._images = EncodedColumn(self.files, choose_column(schema, "image", image_column))
        self._objects = read_column(self.files, "objects").combine_chunks()
        fields = [field.name for field in self._objects.type]
        category = next((name for name in CATEGORY_FIELDS if name in fields), None)
        if "bbox" not in fields or category is None:
            raise DataError(f"expected objects with bbox and category in {self.files[0]}, got {', '.join(fields)}.")
        self._category: str = category
        self.classes = self._class_names(read_features(schema).get("objects", {}), classes)
        self.category_ids = list(range(len(self.classes)))
        self.has_masks = "instance_mask" in schema.names
        self._masks = EncodedColumn(self.files, "instance_mask")
        ids = read_column(self.files, "image_id").to_numpy() if "image_id" in schema.names else np.arange(len(self))
        self.image_ids = ids.astype(np.int64)
        if len(np.unique(self.image_ids)) != len(self):
            raise DataError(f"expected unique values of image_id in {self.files[0]}, got duplicates.")

    def __len__(self) -> int:
        return len(self._objects)

    def read(self, index: int) -> Image.Image:
        return read_image(*self._images.encoded(index))

    def name(self, index: int) -> str:
        return self._images.name(index)

    def objects(self, index: int, size: tuple[int, int]) -> Objects:
        row = self._objects[index].as_py()
        boxes = np.array(row["bbox"], np.float32).reshape(-1, 4)
        is_finite = np.isfinite(boxes).all(1)
        if not is_finite.all():
            raise DataError(f"{self.name(index)}: the box of object {int(np.argmin(is_finite))} is not finite.")
        boxes[:, 2:] += boxes[:, :2]
        labels = np.array(row[self._category], np.int64) + 1
        invalid = np.flatnonzero((labels < 1) | (labels > len(self.classes)))
        if len(invalid):
            category = int(labels[invalid[0]]) - 1
            raise DataError(
                f"{self.name(index)}: object {invalid[0]} has category {category}, "
                f"expected 0 to {len(self.classes) - 1}."
            )
        ids = np.array(row["id"] if row.get("id") is not None else range(len(boxes)), np.int64)
        crowd = np.array(row["iscrowd"] if row.get("iscrowd") is not None else [0] * len(boxes), bool)
        return Objects(boxes, labels, self._instance_masks(index, len(boxes), size), crowd, ids)

    def ground_truth(self) -> dict[str, Any]:
        return to_coco(self)

    def _instance_masks(self, index: int, count: int, size: tuple[int, int]) -> np.ndarray | None:
        if not self.has_masks:
            return None
        try:
            instances = read_mask_values(*self._masks.encoded(index))
        except BadImage as error:
            raise DataError(f"{self.name(index)}: cannot read its instance_mask ({error.reason}).") from error
        if instances.shape != size[::-1] or int(instances.max(initial=0)) > count:
            raise DataError(
                f"{self.name(index)}: expected an instance_mask of shape {size[::-1]} with values up to {count}, "
                f"got shape {instances.shape} with values up to {instances.max(initial=0)}."
            )
        return (instances.astype(np.int32) == np.arange(1, count + 1, dtype=np.int32)[:, None, None]).astype(np.uint8)

    def _class_names(self, feature: Any, classes: list[str] | None) -> list[str]:
        """Names from Hugging Face's metadata, else from the other split, else the indices."""
        category = feature.get(self._category, {}) if isinstance(feature, dict) else {}
        names = (category.get("feature") or {}).get("names") if isinstance(category, dict) else None
        if names is None:
            values = self._objects.field(self._category).flatten().to_numpy(zero_copy_only=False)
            names = classes or [str(i) for i in range(int(values.max(initial=-1)) + 1)]
        if classes is not None and list(names) != classes:
            raise DataError(
                f"expected the classes of the training set ({', '.join(classes[:5])}) in {self.files[0]}, "
                f"got {', '.join(names[:5])}."
            )
        return list(names)
