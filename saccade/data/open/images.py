"""Labelled images and videos at a path."""

import glob
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from saccade.data.open.splits import (
    EMBEDDED_IMAGES,
    EMBEDDED_VIDEOS,
    EVAL_NAMES,
    TRAIN_NAMES,
    check_exists,
    choose_split,
    embedded_splits,
    eval_split,
    files_matching,
    group_files,
    train_split,
)
from saccade.data.sources.base import DataError, Source, Subset, check_labels, hold_out
from saccade.data.sources.folder import FolderSource
from saccade.data.sources.shards import ShardSource
from saccade.data.sources.table import TableSource, saved_dataset_files
from saccade.data.sources.videos import VideoFolder, VideoList
from saccade.data.synthetic.motions import MOTIONS, MotionSet
from saccade.data.synthetic.scenes import Scenes

LIST_SUFFIXES = (".csv", ".tsv", ".txt")

Opener = Callable[..., Source]  # called with classes=...
Finder = Callable[..., dict[str, Opener]]  # path and options -> splits


def open_train_and_val(
    path: str | Path,
    val_path: str | Path | None = None,
    val_fraction: float = 0.1,
    seed: int = 0,
    find: Finder | None = None,
    **options: Any,
) -> tuple[Source, Source]:
    """Training and validation sets, checked. Without a validation split, `val_fraction` of each class is held out.

    `options` are those of `find`, by default `find_splits`; pass `find_video_splits` for videos.
    """
    splits = (find or find_splits)(path, **options)
    train: Source = train_split(splits)(classes=None)
    check_labels(train, "training")
    val: Source
    if val_path is not None:
        val = open_split(val_path, None, train.classes, find, **options)
    elif (open_val := eval_split(splits)) is not None:
        val = open_val(classes=train.classes)
    else:
        train, val = hold_out(train, val_fraction, seed)
    if val.classes != train.classes:
        val = _match_classes(val, train.classes)
    check_labels(val, "validation")
    return train, val


def open_split(
    path: str | Path,
    split: str | None = None,
    classes: list[str] | None = None,
    find: Finder | None = None,
    **options: Any,
) -> Source:
    """One dataset: the requested split, else the one for evaluation, else everything."""
    source = choose_split((find or find_splits)(path, **options), split, path)(classes=classes)
    return _match_classes(source, classes) if classes is not None and source.classes != classes else source


def find_splits(
    path: str | Path,
    image_column: str | None = None,
    label_column: str | None = None,
    scenes: int = 2048,
    size: int = 64,
) -> dict[str, Opener]:
    """Labelled images. `scenes` (number of training images) and `size` are for the embedded dataset."""
    if str(path) == EMBEDDED_IMAGES:
        return embedded_splits(Scenes, scenes, max(10, scenes // 4), size)
    columns = {"image_column": image_column, "label_column": label_column}
    path = Path(path)
    if any(character in str(path) for character in "*?[") and not path.exists():
        return _find_in_files(sorted(glob.glob(str(path), recursive=True)), columns, str(path))
    check_exists(path, "a folder, a Parquet file, tar shards, a glob", EMBEDDED_IMAGES)
    if path.is_file():
        return _find_in_files([str(path)], columns, str(path))
    return _find_in_folder(path, columns)


def _find_in_folder(path: Path, columns: dict[str, Any]) -> dict[str, Opener]:
    if (path / "dataset_dict.json").is_file():  # DatasetDict.save_to_disk
        names = json.loads((path / "dataset_dict.json").read_text())["splits"]
        return {name: partial(TableSource, saved_dataset_files(path / name), **columns) for name in names}
    if (path / "state.json").is_file():  # Dataset.save_to_disk
        return {"all": partial(TableSource, saved_dataset_files(path), **columns)}
    if files := files_matching(path, "*.parquet", "*.tar"):
        return _find_in_files(files, columns, str(path))
    folders = [entry.name for entry in os.scandir(path) if entry.is_dir() and entry.name in TRAIN_NAMES + EVAL_NAMES]
    if any(name in TRAIN_NAMES for name in folders):
        ordered = sorted(folders, key=(TRAIN_NAMES + EVAL_NAMES).index)
        return {name: next(iter(_find_in_folder(path / name, columns).values())) for name in ordered}
    return {"all": partial(FolderSource, path)}


def _find_in_files(files: list[str], columns: dict[str, Any], location: str) -> dict[str, Opener]:
    groups = group_files(files, location)
    if files[0].endswith(".tar"):
        return {split: partial(ShardSource, members) for split, members in groups.items()}
    return {split: partial(TableSource, members, **columns) for split, members in groups.items()}


class _RelabelledSource(Subset):
    """A source with the class indices of another list of names."""

    def __init__(self, source: Source, classes: list[str]):
        super().__init__(source, range(len(source)))
        self.classes = classes
        for old, name in enumerate(source.classes):
            self.labels[source.labels == old] = classes.index(name)


def _match_classes(source: Source, classes: list[str]) -> Source:
    """Map labels to `classes` by name. Names that are indices only match by index."""
    if all(name.isdigit() for name in source.classes) and len(source.classes) <= len(classes):
        source.classes = classes
        return source
    if unknown := [name for name in source.classes if name not in classes]:
        raise DataError(
            f"{len(unknown)} of {len(source.classes)} classes are unknown: {', '.join(unknown[:3])}. "
            f"Expected names among {', '.join(classes[:3])}, ... ({len(classes)} in total)."
        )
    return _RelabelledSource(source, classes)


def find_video_splits(
    path: str | Path, motions: int = 4096, size: int = 64, frames: int = 8, **_: Any
) -> dict[str, Opener]:
    """Labelled videos. `motions` (number of training clips), `size` and `frames` are for the embedded dataset."""
    if str(path) == EMBEDDED_VIDEOS:
        return embedded_splits(MotionSet, motions, max(len(MOTIONS), motions // 4), size, frames)
    path = Path(path)
    check_exists(path, "class folders of videos, a CSV list of files", EMBEDDED_VIDEOS)
    if path.is_file():
        if path.suffix not in LIST_SUFFIXES:
            raise DataError(f"expected a list of videos ({', '.join(LIST_SUFFIXES)}) or a folder, got {path}.")
        return {"all": partial(VideoList, path)}
    lists = {file.stem.lower(): file for suffix in LIST_SUFFIXES for file in sorted(path.glob(f"*{suffix}"))}
    if names := [name for name in TRAIN_NAMES + EVAL_NAMES if name in lists]:
        return {name: partial(VideoList, lists[name]) for name in names}
    folders = [name for name in TRAIN_NAMES + EVAL_NAMES if (path / name).is_dir()]
    if any(name in TRAIN_NAMES for name in folders):
        return {name: partial(VideoFolder, path / name) for name in folders}
    return {"all": partial(VideoFolder, path)}
