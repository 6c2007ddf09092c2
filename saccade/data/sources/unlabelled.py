"""Images without labels, or whose labels are not read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from saccade._extras import printable
from saccade.data.decode.image import IMAGE_SUFFIXES, read_image
from saccade.data.sources.base import DataError
from saccade.data.sources.folder import walk_files
from saccade.data.sources.table import EncodedColumn, choose_column, read_schema


class Unlabelled:
    """The part of `Source` that both have: one class, label 0."""

    unlabelled = True

    def __init__(self, count: int):
        self.classes = ["image"]
        self.labels = np.zeros(count, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.labels)


class UnlabelledFolder(Unlabelled):
    """The images of a folder and of its sub-folders."""

    def __init__(self, root: str | Path, classes: Any = None):
        self.root = Path(root)
        self.paths = sorted(walk_files(self.root, IMAGE_SUFFIXES))
        if not self.paths:
            raise DataError(f"expected images in {self.root} or its sub-folders, got none.")
        super().__init__(len(self.paths))

    def read(self, index: int) -> Image.Image:
        return read_image(self.root / self.paths[index])

    def name(self, index: int) -> str:
        return printable(self.root / self.paths[index])


class UnlabelledTable(Unlabelled):
    """The images in the rows of Parquet or Arrow files."""

    def __init__(self, files: Sequence[str | Path], image_column: str | None = None, classes: Any = None):
        column = choose_column(read_schema(str(files[0])), "image", image_column)
        self._images = EncodedColumn(files, column)
        super().__init__(len(self._images))

    def read(self, index: int) -> Image.Image:
        return read_image(*self._images.encoded(index))

    def name(self, index: int) -> str:
        return self._images.name(index)
