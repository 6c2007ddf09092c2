"""Images and masks in two columns of Parquet or Arrow files."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from saccade.data.decode.image import read_image
from saccade.data.sources.masks import choose_labels
from saccade.data.sources.table import EncodedColumn, choose_column, read_schema


class MaskTable:
    """Rows with an encoded image and an encoded mask.

    Class names and the ignored value default to `class_names` and `ignore_index` in the metadata of the schema, class
    names then to `classes` of another split. Without any, classes are counted.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        image_column: str | None = None,
        mask_column: str | None = None,
        names: list[str] | None = None,
        mask_values: Sequence[int | str] | None = None,
        ignore_index: int | None = None,
        reduce_zero_label: bool = False,
        classes: list[str] | None = None,
    ):
        schema = read_schema(str(files[0]))
        metadata = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
        if ignore_index is None and "ignore_index" in metadata:
            ignore_index = int(metadata["ignore_index"])
        self._images = EncodedColumn(files, choose_column(schema, "image", image_column))
        self._masks = EncodedColumn(files, choose_column(schema, "mask", mask_column))
        names = names or json.loads(metadata.get("class_names", "[]")) or classes
        options = (str(files[0]), names, mask_values, ignore_index, reduce_zero_label)
        self.classes, self.label_map = choose_labels(len(self._masks), self._masks.encoded, *options)

    def __len__(self) -> int:
        return len(self._images)

    def read(self, index: int) -> Image.Image:
        return read_image(*self._images.encoded(index))

    def read_mask(self, index: int) -> np.ndarray:
        data, name = self._masks.encoded(index)
        return self.label_map.read(data, f"{name}, {self._masks.column}")

    def name(self, index: int) -> str:
        return self._images.name(index)
