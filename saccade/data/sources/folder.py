"""Pictures in folders: one sub-folder per class."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from saccade.data.decode.image import IMAGE_SUFFIXES, read_image
from saccade.data.sources.base import DataError


class FolderSource:
    """`root/<class>/…/picture.jpg`; classes are the sorted names of the sub-folders.

    `classes` gives the list of another split, so that both agree on the numbers.
    """

    suffixes = IMAGE_SUFFIXES
    members = "pictures"

    def __init__(self, root: str | Path, classes: list[str] | None = None):
        self.root = Path(root)
        found = sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir() and entry.name[0] != ".")
        if not found:
            loose = sum(self._belongs(entry.name) for entry in os.scandir(self.root))
            what = f"{loose} {self.members} lie directly in it" if loose else "it holds no sub-folders"
            raise DataError(f"{self.root} is no folder of {self.members}: {what}. Expected one sub-folder per class.")
        if classes is not None and (unknown := sorted(set(found) - set(classes))):
            raise DataError(f"{self.root} has classes the training set has not: {', '.join(unknown[:5])}.")
        self.classes = list(classes) if classes is not None else found
        self.paths: list[str] = []
        labels: list[int] = []
        for name in found:
            members = self._files_under(self.root / name)
            if not members:
                raise DataError(f"the class folder {self.root / name} holds no {self.members}. Add some or remove it.")
            self.paths.extend(members)
            labels.extend([self.classes.index(name)] * len(members))
        self.labels = np.asarray(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> Any:
        return read_image(self.root / self.paths[index])

    def name(self, index: int) -> str:
        return str(self.root / self.paths[index])

    def _belongs(self, name: str) -> bool:
        return name[0] != "." and os.path.splitext(name)[1].lower() in self.suffixes

    def _files_under(self, folder: Path) -> list[str]:
        """Paths relative to the class folder's parent, sorted: the same order on every machine."""
        found = []
        for where, folders, files in os.walk(folder, followlinks=True):
            folders[:] = [name for name in folders if name[0] != "."]
            inside = os.path.relpath(where, folder.parent)
            found.extend(os.path.join(inside, name) for name in files if self._belongs(name))
        return sorted(found)
