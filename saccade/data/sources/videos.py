"""Videos on disk, with their classes: one sub-folder per class, or a list of files."""

import csv
from pathlib import Path

import numpy as np

from saccade.data.decode.video import VIDEO_SUFFIXES, VideoFile
from saccade.data.sources.base import DataError
from saccade.data.sources.folder import FolderSource

PATHS = ("path", "file", "filename", "file_name", "video", "video_path")
LABELS = ("label", "class", "category", "class_name", "action")


class VideoFolder(FolderSource):
    """`root/<class>/…/video.mp4`; classes are the sorted names of the sub-folders."""

    suffixes = VIDEO_SUFFIXES
    members = "videos"

    def read(self, index: int) -> VideoFile:
        return VideoFile(self.root / self.paths[index])


class VideoList:
    """A CSV file (or one with tabs or blanks): path and label in every row, with or without a line of titles.

    Paths are relative to the list or to `root`. Labels are names, or numbers; then a file classes.txt beside the list
    may name them, one a line.
    """

    def __init__(self, path: str | Path, classes: list[str] | None = None, root: str | Path | None = None):
        self.path = Path(path)
        self.root = Path(root) if root is not None else self.path.parent
        rows = read_rows(self.path)
        self.paths = [row[0] for row in rows]
        labels = [row[1] for row in rows]
        if all(label.lstrip("-").isdigit() for label in labels):
            numbers = [int(label) for label in labels]
            self.classes = classes or _names_beside(self.path) or [str(i) for i in range(max(numbers) + 1)]
            self.labels = np.asarray(numbers, dtype=np.int64)
        else:
            self.classes = classes or sorted(set(labels))
            if unknown := sorted(set(labels) - set(self.classes)):
                raise DataError(f"{self.path} has classes the training set has not: {', '.join(unknown[:5])}.")
            number = {name: i for i, name in enumerate(self.classes)}
            self.labels = np.asarray([number[label] for label in labels], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> VideoFile:
        return VideoFile(self.root / self.paths[index])

    def name(self, index: int) -> str:
        return str(self.root / self.paths[index])


def read_rows(path: Path) -> list[tuple[str, str]]:
    """(path, label) of every row."""
    lines = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    if not lines:
        raise DataError(f"{path} is empty: expected rows of path and label.")
    sign = next((sign for sign in ",\t;" if sign in lines[0]), " ")
    # With blanks between them, the label is the last word: paths may have blanks, too.
    rows = [line.rsplit(None, 1) for line in lines] if sign == " " else list(csv.reader(lines, delimiter=sign))
    titles = [cell.strip().lower() for cell in rows[0]]
    at, label = 0, 1
    if any(name in titles for name in PATHS) and any(name in titles for name in LABELS):
        at = next(titles.index(name) for name in PATHS if name in titles)
        label = next(titles.index(name) for name in LABELS if name in titles)
        rows = rows[1:]
    for number, row in enumerate(rows, 1):
        if len(row) <= max(at, label):
            raise DataError(f"{path}, row {number}: expected path and label, got {sign.join(row)!r}.")
    if not rows:
        raise DataError(f"{path} has titles and no rows.")
    return [(row[at].strip(), row[label].strip()) for row in rows]


def _names_beside(path: Path) -> list[str] | None:
    names = path.parent / "classes.txt"
    return names.read_text(encoding="utf-8").splitlines() if names.is_file() else None
