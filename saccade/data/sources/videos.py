"""Labelled videos: one sub-folder per class, or a list of files."""

import csv
from pathlib import Path

import numpy as np

from saccade._extras import printable
from saccade.data.decode.video import VIDEO_SUFFIXES, VideoFile
from saccade.data.sources.base import DataError, index_labels, read_class_names
from saccade.data.sources.folder import FolderSource

PATH_COLUMNS = ("path", "file", "filename", "file_name", "video", "video_path")
LABEL_COLUMNS = ("label", "class", "category", "class_name", "action")


class VideoFolder(FolderSource):
    """`root/<class>/.../video.mp4`. Classes are the sorted names of the sub-folders, or `classes` of another split."""

    suffixes = VIDEO_SUFFIXES
    content = "videos"

    def read(self, index: int) -> VideoFile:
        return VideoFile(self.root / self.paths[index])


class VideoList:
    """A CSV, TSV or space-separated file with a path and a label per row, with or without a header.

    Paths are relative to `root`, by default the folder of the list. Labels are class names or indices; classes.txt in
    the same folder names the indices.
    """

    def __init__(self, path: str | Path, classes: list[str] | None = None, root: str | Path | None = None):
        self.path = Path(path)
        self.root = Path(root) if root is not None else self.path.parent
        rows = read_rows(self.path)
        self.paths = [row[0] for row in rows]
        labels = [row[1] for row in rows]
        if all(label.lstrip("-").isdigit() for label in labels):
            self.labels = np.asarray([int(label) for label in labels], dtype=np.int64)
            names = classes or read_class_names(self.path.parent)
            self.classes = names or [str(i) for i in range(int(self.labels.max()) + 1)]
        else:
            self.classes, self.labels = index_labels(labels, classes, str(self.path))

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> VideoFile:
        return VideoFile(self.root / self.paths[index])

    def name(self, index: int) -> str:
        return printable(self.root / self.paths[index])


def read_rows(path: Path) -> list[tuple[str, str]]:
    """(path, label) of every row."""
    lines = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    if not lines:
        raise DataError(f"expected rows of path and label, got an empty file: {path}.")
    delimiter = next((delimiter for delimiter in ",\t;" if delimiter in lines[0]), " ")
    # Paths may contain spaces, so in space-separated lists the label is the last word.
    rows = (
        [line.rsplit(None, 1) for line in lines] if delimiter == " " else list(csv.reader(lines, delimiter=delimiter))
    )
    header = [cell.strip().lower() for cell in rows[0]]
    path_column, label_column = 0, 1
    if any(name in header for name in PATH_COLUMNS) and any(name in header for name in LABEL_COLUMNS):
        path_column = next(header.index(name) for name in PATH_COLUMNS if name in header)
        label_column = next(header.index(name) for name in LABEL_COLUMNS if name in header)
        rows = rows[1:]
    for number, row in enumerate(rows, 1):
        if len(row) <= max(path_column, label_column):
            raise DataError(f"{path}, row {number}: expected path and label, got {delimiter.join(row)!r}.")
    if not rows:
        raise DataError(f"expected rows of path and label, got only a header: {path}.")
    return [(row[path_column].strip(), row[label_column].strip()) for row in rows]
