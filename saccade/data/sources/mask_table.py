"""Pictures and masks in two columns of Parquet or Arrow files."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from saccade.data.decode.image import read_image
from saccade.data.sources.base import DataError
from saccade.data.sources.masks import IGNORE, Numbering, decode_mask
from saccade.data.sources.table import EncodedColumn, describe_columns

MASK_NAMES = ("annotation", "mask", "label", "labels", "segmentation", "segmentation_mask", "semantic")


class MaskTable:
    """Rows with an encoded picture and an encoded mask; the schema's `class_names` and `ignore_index` are used."""

    def __init__(
        self,
        files: Sequence[str | Path],
        image_column: str | None = None,
        mask_column: str | None = None,
        classes: list[str] | None = None,
        ignore: int | None = None,
        zero_is_unlabelled: bool = False,
    ):
        names, metadata = describe_columns(str(files[0]))
        self.image_column = image_column or _column(names, ("image", "img", "picture"), "image")
        self.mask_column = mask_column or _column(names, MASK_NAMES, "mask")
        written = metadata.get("class_names")
        self.classes = classes or (json.loads(written) if written else [])
        if not self.classes:
            raise DataError(f"{files[0]} names no classes (metadata class_names): give data.classes or id2label.json.")
        ignore = int(metadata.get("ignore_index", IGNORE)) if ignore is None else ignore
        self.numbering = Numbering(len(self.classes), zero_is_unlabelled=zero_is_unlabelled, ignore=ignore)
        self._images = EncodedColumn(files, self.image_column)
        self._masks = EncodedColumn(files, self.mask_column)

    def __len__(self) -> int:
        return len(self._images)

    def read(self, index: int) -> Image.Image:
        return read_image(*self._images.encoded(index))

    def read_mask(self, index: int) -> np.ndarray:
        data, name = self._masks.encoded(index)
        return self.numbering(decode_mask(data, name), f"{name}, {self.mask_column}")

    def name(self, index: int) -> str:
        return self._images.name(index)


def _column(names: list[str], usual: Sequence[str], role: str) -> str:
    found = [name for name in usual if name in names]
    if not found:
        raise DataError(f"no {role} column among {', '.join(names)}; name it: --set data.{role}_column=NAME.")
    return found[0]
