"""Labelled files in a list: CSV, TSV, space-separated, or JSON lines."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

from saccade.data.sources.base import DataError, index_label_lists, index_labels, numbered_classes, read_class_names
from saccade.data.sources.folder import PathSource

LIST_SUFFIXES = (".csv", ".tsv", ".jsonl")
PATH_COLUMNS = ("path", "file", "filename", "file_name", "image", "image_path", "video", "video_path")
LABEL_COLUMNS = ("label", "labels", "class", "classes", "category", "class_name", "action", "tags")


class ImageList(PathSource):
    """A list with a path and its labels per row, with or without a header.

    Paths are relative to `root`, by default the folder of the list. Labels are class names or indices; classes.txt in
    the same folder names the indices. Several labels are separated by "|", in JSON lines they are a list; the source is
    then multi-label.
    """

    def __init__(self, path: str | Path, classes: list[str] | None = None, root: str | Path | None = None):
        self.path = Path(path)
        self.root = Path(root) if root is not None else self.path.parent
        rows = read_json_rows(self.path) if self.path.suffix == ".jsonl" else read_rows(self.path)
        self.paths = [row[0] for row in rows]
        labels = [row[1] for row in rows]
        where, names = str(self.path), classes or read_class_names(self.path.parent)
        if all(isinstance(label, list) for label in labels):
            has_names = any(isinstance(label, str) for row in labels for label in row)
            self.classes, self.labels = index_label_lists(labels, classes if has_names else names, where)
        elif all(isinstance(label, int) for label in labels):
            self.labels = np.asarray(labels, dtype=np.int64)
            self.classes = names or numbered_classes(self.labels, where)
        else:
            self.classes, self.labels = index_labels([str(label) for label in labels], classes, where)


def find_list(folder: Path, *stems: str) -> Path | None:
    """The first list in a folder with one of these names."""
    files = (folder / f"{stem}{suffix}" for stem in stems for suffix in LIST_SUFFIXES)
    return next((file for file in files if file.is_file()), None)


def read_rows(path: Path) -> list[tuple[str, Any]]:
    """(path, label) of every row; lists of labels if a row has several."""
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
    cells = [row[label_column].strip() for row in rows]
    labels: list[Any] = cells
    if any("|" in cell for cell in cells):
        labels = [[label.strip() for label in cell.split("|") if label.strip()] for cell in cells]
        if all(label.isdigit() for row in labels for label in row):
            labels = [[int(label) for label in row] for row in labels]
    elif all(cell.removeprefix("-").isdigit() for cell in cells):
        labels = [int(cell) for cell in cells]
    elif "" in cells:
        raise DataError(
            f"{path}, row {cells.index('') + 1}: expected a label, got none. Separate several labels by |, or use JSON "
            "lines with lists."
        )
    return [(row[path_column].strip(), label) for row, label in zip(rows, labels, strict=True)]


def read_json_rows(path: Path) -> list[tuple[str, Any]]:
    """(path, label or list of labels) of every line."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            file = next(entry[key] for key in PATH_COLUMNS if key in entry)
            rows.append((str(file), next(entry[key] for key in LABEL_COLUMNS if key in entry)))
        except (ValueError, TypeError, RecursionError, StopIteration) as error:
            raise DataError(
                f"{path}, line {number}: expected a JSON object with a path (file) and its labels, got {line[:80]!r}."
            ) from error
    kinds = {type(label) for _, label in rows}
    if len(kinds) != 1 or not kinds <= {str, int, list}:
        types = ", ".join(sorted(kind.__name__ for kind in kinds)) or "no line"
        raise DataError(f"expected labels that are all names, all indices or all lists in {path}, got {types}.")
    return rows
