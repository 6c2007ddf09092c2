"""Splits of a dataset by name, whatever the task."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from saccade.data.sources.base import DataError

TRAIN_NAMES = ("train", "training")
EVAL_NAMES = ("val", "validation", "valid", "dev", "test", "testing")
EMBEDDED_IMAGES, EMBEDDED_VIDEOS = "scenes", "motions"

Opener = Callable[..., Any]  # classes -> the source of a split
Finder = Callable[..., dict[str, Opener]]  # path and options -> openers by split


def train_split(splits: dict[str, Opener]) -> Opener:
    """The split for training, else the first."""
    return splits[next((name for name in TRAIN_NAMES if name in splits), next(iter(splits)))]


def eval_split(splits: dict[str, Opener]) -> Opener | None:
    """The split for evaluation, None if there is none."""
    name = next((name for name in EVAL_NAMES if name in splits), None)
    return None if name is None else splits[name]


def choose_split(splits: dict[str, Opener], split: str | None, path: str | Path) -> Opener:
    """The requested split, else the one for evaluation, else the first."""
    if split is None:
        return eval_split(splits) or next(iter(splits.values()))
    if split not in splits:
        raise DataError(f"{path} has no split {split!r}. Choose one of {', '.join(splits)}.")
    return splits[split]


def embedded_splits(create: Opener, train: int, val: int, *args: Any) -> dict[str, Any]:
    """Openers create(count, *args, split) of an embedded dataset; its classes are fixed."""

    def opener(count: int, split: str, classes: list[str] | None = None) -> Any:
        return create(count, *args, split)

    return {split: partial(opener, count, split) for split, count in (("train", train), ("val", val), ("test", val))}


def check_exists(path: Path, expected: str, embedded: str) -> None:
    """Raise `DataError` if there is nothing at `path`."""
    if not path.exists():
        raise DataError(f"no data at {path}: expected {expected}, or {embedded!r}.")


def files_matching(path: Path, *patterns: str) -> list[str]:
    """Sorted files of the first pattern that matches in a folder, or in its folder data/, as on Hugging Face."""
    for folder in (path, path / "data"):
        for pattern in patterns:
            if files := sorted(str(file) for file in folder.glob(pattern) if file.name[0] != "."):
                return files
    return []


def group_files(files: list[str], location: str) -> dict[str, list[str]]:
    """Group files by the split that their names begin with: train-00000-of-00008.parquet, val.parquet, ..."""
    if not files:
        raise DataError(f"no file matches {location}.")
    suffixes = {Path(file).suffix for file in files}
    if len(suffixes) > 1 or not suffixes <= {".parquet", ".tar", ".arrow"}:
        raise DataError(f"{location}: expected .parquet, .arrow or .tar files, got {', '.join(sorted(suffixes))}.")
    groups: dict[str, list[str]] = {}
    for file in files:
        prefix = re.split(r"[-_.\d]", Path(file).name)[0].lower()
        groups.setdefault(prefix if prefix in TRAIN_NAMES + EVAL_NAMES else "all", []).append(file)
    return {"all": files} if len(groups) == 1 and "train" not in groups else groups
