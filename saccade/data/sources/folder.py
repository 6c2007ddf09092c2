"""Image folders: one sub-folder per class."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from saccade._extras import printable
from saccade.data.decode.image import IMAGE_SUFFIXES, read_image
from saccade.data.sources.base import DataError, check_known_classes


class PathSource:
    """Images at `paths` relative to `root`."""

    root: Path
    paths: list[str]

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> Any:
        return read_image(self.root / self.paths[index])

    def name(self, index: int) -> str:
        return printable(self.root / self.paths[index])


class FolderSource(PathSource):
    """`root/<class>/.../image.jpg`. Classes are the sorted names of the sub-folders, or `classes` of another split."""

    suffixes = IMAGE_SUFFIXES
    content = "images"

    def __init__(self, root: str | Path, classes: list[str] | None = None):
        self.root = Path(root)
        names = sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir() and entry.name[0] != ".")
        if not names:
            count = sum(is_data_file(entry.name, self.suffixes) for entry in os.scandir(self.root))
            detail = f"{count} {self.content} directly in it" if count else "no sub-folders"
            raise DataError(f"expected one sub-folder of {self.content} per class in {self.root}, got {detail}.")
        if classes is not None:
            check_known_classes(set(map(printable, names)), classes, str(self.root))
        self.classes = list(classes) if classes is not None else list(map(printable, names))
        self.paths = []
        labels: list[int] = []
        for name in names:
            paths = sorted(os.path.join(name, path) for path in walk_files(self.root / name, self.suffixes))
            if not paths:
                raise DataError(f"the class folder {self.root / name} has no {self.content}. Add some or remove it.")
            self.paths.extend(paths)
            labels.extend([self.classes.index(printable(name))] * len(paths))
        self.labels = np.asarray(labels, dtype=np.int64)


def is_data_file(name: str, suffixes: set[str]) -> bool:
    """Whether a file name has one of `suffixes` and is not hidden."""
    return name[0] != "." and os.path.splitext(name)[1].lower() in suffixes


def walk_files(folder: Path, suffixes: set[str]) -> Iterator[str]:
    """Paths relative to `folder` of its data files, through links and sub-folders, without hidden ones."""
    for root, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if name[0] != "."]
        for name in files:
            if is_data_file(name, suffixes):
                yield os.path.relpath(os.path.join(root, name), folder)
