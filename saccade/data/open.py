"""A path -> training and validation sources: looks at what lies there and says so when it is nothing known."""

import glob
import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from saccade.data.sources.base import DataError, Source, Subset, check_labels, hold_out
from saccade.data.sources.folder import FolderSource
from saccade.data.sources.shards import ShardSource
from saccade.data.sources.table import TableSource, disk_files
from saccade.data.synthetic.scenes import Scenes

TRAIN, HELD_OUT = ("train", "training"), ("val", "validation", "valid", "dev", "test", "testing")
EMBEDDED = "scenes"
Opener = Callable[..., Source]  # called with classes=…
Finder = Callable[..., dict[str, Opener]]  # path and options -> splits


def open_train_and_val(
    path: str | Path,
    val_path: str | Path | None = None,
    val_fraction: float = 0.1,
    seed: int = 0,
    find: Finder | None = None,
    **options: Any,
) -> tuple[Source, Source]:
    """Both sources, checked. Without a validation split, `val_fraction` of every class is held out.

    Options: `image_column`, `label_column` for tables; `scenes` (count) and `size` for the embedded scenes. `find`
    looks for something else than pictures, see `open_videos`.
    """
    splits = (find or find_splits)(path, **options)
    names = [name for name in TRAIN if name in splits]
    train = splits[names[0] if names else next(iter(splits))](classes=None)
    check_labels(train, "training")
    if val_path is not None:
        held = open_split(val_path, None, train.classes, find, **options)
    elif held_names := [name for name in HELD_OUT if name in splits]:
        held = splits[held_names[0]](classes=train.classes)
    else:
        train, held = hold_out(train, val_fraction, seed)
    if held.classes != train.classes:
        held = _renumber(held, train.classes)
    check_labels(held, "validation")
    return train, held


def open_split(
    path: str | Path,
    split: str | None = None,
    classes: list[str] | None = None,
    find: Finder | None = None,
    **options: Any,
) -> Source:
    """One source: the split asked for, else the held-out one, else all there is."""
    splits = (find or find_splits)(path, **options)
    if split is None:
        split = next((name for name in HELD_OUT if name in splits), next(iter(splits)))
    elif split not in splits:
        raise DataError(f"{path} has no split {split!r}; it has {', '.join(splits)}.")
    source = splits[split](classes=classes)
    return _renumber(source, classes) if classes is not None and source.classes != classes else source


def find_splits(
    path: str | Path,
    image_column: str | None = None,
    label_column: str | None = None,
    scenes: int = 2048,
    size: int = 64,
) -> dict[str, Opener]:
    """What lies at `path`, split by split; a path without splits is one split named "all"."""
    if str(path) == EMBEDDED:
        counts = {"train": scenes, "val": max(10, scenes // 4), "test": max(10, scenes // 4)}
        return {split: partial(_open_scenes, count, size, split) for split, count in counts.items()}
    columns = {"image_column": image_column, "label_column": label_column}
    path = Path(path)
    if any(sign in str(path) for sign in "*?[") and not path.exists():
        return _from_files(sorted(glob.glob(str(path), recursive=True)), columns, str(path))
    if not path.exists():
        raise DataError(f"no data at {path}: expected a folder, a Parquet file, tar shards, a glob, or {EMBEDDED!r}.")
    if path.is_file():
        return _from_files([str(path)], columns, str(path))
    return _from_folder(path, columns)


def _from_folder(path: Path, columns: dict[str, Any]) -> dict[str, Opener]:
    if (path / "dataset_dict.json").is_file():  # Hugging Face, saved to disk, several splits
        names = json.loads((path / "dataset_dict.json").read_text())["splits"]
        return {name: partial(TableSource, disk_files(path / name), **columns) for name in names}
    if (path / "state.json").is_file():
        return {"all": partial(TableSource, disk_files(path), **columns)}
    for folder in (path, path / "data"):  # the Hub keeps Parquet under data/
        for pattern in ("*.parquet", "*.tar"):
            if files := sorted(str(file) for file in folder.glob(pattern) if file.name[0] != "."):
                return _from_files(files, columns, str(path))
    named = [entry.name for entry in os.scandir(path) if entry.is_dir() and entry.name in TRAIN + HELD_OUT]
    if any(name in TRAIN for name in named):
        return {name: _whole(path / name, columns) for name in sorted(named, key=(TRAIN + HELD_OUT).index)}
    return {"all": partial(FolderSource, path)}


def _whole(path: Path, columns: dict[str, Any]) -> Opener:
    """A folder that is one split."""
    found = _from_folder(path, columns)
    return next(iter(found.values()))


def _from_files(files: list[str], columns: dict[str, Any], where: str) -> dict[str, Opener]:
    groups = group_files(files, where)
    if files[0].endswith(".tar"):
        return {split: partial(ShardSource, members) for split, members in groups.items()}
    return {split: partial(TableSource, members, **columns) for split, members in groups.items()}


def group_files(files: list[str], where: str) -> dict[str, list[str]]:
    """Files by the split their names begin with: train-00000-of-00008.parquet, val.parquet, …"""
    if not files:
        raise DataError(f"no file matches {where}.")
    kinds = {Path(file).suffix for file in files}
    if len(kinds) > 1 or not kinds <= {".parquet", ".tar", ".arrow"}:
        raise DataError(f"{where}: expected .parquet, .arrow or .tar files, got {', '.join(sorted(kinds))}.")
    groups: dict[str, list[str]] = {}
    for file in files:
        start = re.split(r"[-_.\d]", Path(file).name)[0].lower()
        groups.setdefault(start if start in TRAIN + HELD_OUT else "all", []).append(file)
    return {"all": files} if len(groups) == 1 and "train" not in groups else groups


def _open_scenes(count: int, size: int, split: str, classes: list[str] | None = None) -> Source:
    return Scenes(count, size, split)


class _Renumbered(Subset):
    """The same pictures under the class numbers of another list."""

    def __init__(self, source: Source, classes: list[str], numbers: dict[int, int]):
        super().__init__(source, range(len(source)))
        self.classes = classes
        for old in range(len(source.classes)):
            self.labels[source.labels == old] = numbers[old]


def _renumber(source: Source, classes: list[str]) -> Source:
    """Class numbers of a model or of the training set, matched by name; names that are only numbers match by it."""
    if all(name.isdigit() for name in source.classes) and len(source.classes) <= len(classes):
        source.classes = classes
        return source
    unknown = [name for name in source.classes if name not in classes]
    if unknown:
        raise DataError(
            f"{len(unknown)} of {len(source.classes)} classes are unknown: {', '.join(unknown[:3])}; "
            f"expected names among {', '.join(classes[:3])}, … ({len(classes)} in all)."
        )
    return _Renumbered(source, classes, {i: classes.index(name) for i, name in enumerate(source.classes)})
