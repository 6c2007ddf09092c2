"""Images and masks in two columns of Parquet or Arrow files."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from saccade.data.decode.image import read_image, read_mask_values
from saccade.data.sources.base import DataError
from saccade.data.sources.masks import IGNORE, LabelMap
from saccade.data.sources.table import EncodedColumn, choose_column, read_schema


class MaskTable:
    """Rows with an encoded image and an encoded mask.

    Class names and the ignored value default to `class_names` and `ignore_index` in the metadata of the schema.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        image_column: str | None = None,
        mask_column: str | None = None,
        classes: list[str] | None = None,
        ignore_index: int | None = None,
        reduce_zero_label: bool = False,
    ):
        schema = read_schema(str(files[0]))
        metadata = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
        self.mask_column = choose_column(schema, "mask", mask_column)
        self.classes: list[str] = classes or json.loads(metadata.get("class_names", "[]"))
        if not self.classes:
            raise DataError(
                f"expected class_names in the metadata of {files[0]}, got none. Set data.classes or add id2label.json."
            )
        if ignore_index is None:
            ignore_index = int(metadata.get("ignore_index", IGNORE))
        self.label_map = LabelMap(len(self.classes), None, reduce_zero_label, ignore_index)
        self._images = EncodedColumn(files, choose_column(schema, "image", image_column))
        self._masks = EncodedColumn(files, self.mask_column)

    def __len__(self) -> int:
        return len(self._images)

    def read(self, index: int) -> Image.Image:
        return read_image(*self._images.encoded(index))

    def read_mask(self, index: int) -> np.ndarray:
        data, name = self._masks.encoded(index)
        return self.label_map(read_mask_values(data, name), f"{name}, {self.mask_column}")

    def name(self, index: int) -> str:
        return self._images.name(index)
