"""Labelled images and videos at a path."""

import glob
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from saccade.data.open.splits import (
    EMBEDDED_IMAGES,
    EMBEDDED_VIDEOS,
    EVAL_NAMES,
    TRAIN_NAMES,
    Opener,
    check_exists,
    embedded_splits,
    files_matching,
    group_files,
)
from saccade.data.sources.base import DataError, with_label_kind
from saccade.data.sources.folder import FolderSource
from saccade.data.sources.lists import LIST_SUFFIXES, ImageList, find_list
from saccade.data.sources.shards import ShardSource
from saccade.data.sources.table import TableSource, saved_dataset_files
from saccade.data.sources.unlabelled import UnlabelledFolder, UnlabelledTable
from saccade.data.sources.videos import VideoFolder, VideoList
from saccade.data.synthetic.motions import MOTIONS, MotionSet
from saccade.data.synthetic.scenes import Scenes


def find_splits(
    path: str | Path,
    image_column: str | None = None,
    label_column: str | None = None,
    multi_label: bool | None = None,
    scenes: int = 2048,
    size: int = 64,
) -> dict[str, Opener]:
    """Labelled images. `scenes` (number of training images) and `size` are for the embedded dataset.

    `multi_label` true makes single labels multi-hot, false expects one label per image, None takes them as they are.
    """
    table = partial(TableSource, image_column=image_column, label_column=label_column)
    if Path(path).suffix in LIST_SUFFIXES and Path(path).is_file():
        return _with_label_kind({"all": partial(ImageList, path)}, multi_label)
    return _with_label_kind(_find(path, table, _open_folder, scenes, size), multi_label)


def _open_folder(root: Path, classes: list[str] | None = None) -> Any:
    """The images of labels.csv, labels.tsv or labels.jsonl, or else one sub-folder per class."""
    file = find_list(root, "labels")
    return FolderSource(root, classes) if file is None else ImageList(file, classes)


def _with_label_kind(splits: dict[str, Opener], multi_label: bool | None) -> dict[str, Opener]:
    def opener(split: str, classes: list[str] | None = None) -> Any:
        return with_label_kind(splits[split](classes=classes), multi_label)

    return {split: partial(opener, split) for split in splits}


def find_unlabelled_splits(
    path: str | Path, image_column: str | None = None, scenes: int = 2048, size: int = 64
) -> dict[str, Opener]:
    """Images without labels; those of labelled data are not read. Folders may have any sub-folders."""
    return _find(path, partial(UnlabelledTable, image_column=image_column), UnlabelledFolder, scenes, size)


def _find(path: str | Path, table: Opener, folder: Opener, scenes: int, size: int) -> dict[str, Opener]:
    """Splits at a path; `table` opens a list of Parquet or Arrow files, `folder` a folder of images."""
    if str(path) == EMBEDDED_IMAGES:
        return embedded_splits(Scenes, scenes, max(10, scenes // 4), size)
    path = Path(path)
    if any(character in str(path) for character in "*?[") and not path.exists():
        return _find_in_files(sorted(glob.glob(str(path), recursive=True)), table, str(path))
    check_exists(path, "a folder, a Parquet file, tar shards, a glob", EMBEDDED_IMAGES)
    if path.is_file():
        return _find_in_files([str(path)], table, str(path))
    return _find_in_folder(path, table, folder)


def _find_in_folder(path: Path, table: Opener, folder: Opener) -> dict[str, Opener]:
    if (path / "dataset_dict.json").is_file():  # DatasetDict.save_to_disk
        names = json.loads((path / "dataset_dict.json").read_text())["splits"]
        return {name: partial(table, saved_dataset_files(path / name)) for name in names}
    if (path / "state.json").is_file():  # Dataset.save_to_disk
        return {"all": partial(table, saved_dataset_files(path))}
    if files := files_matching(path, "*.parquet", "*.tar"):
        return _find_in_files(files, table, str(path))
    folders = [entry.name for entry in os.scandir(path) if entry.is_dir() and entry.name in TRAIN_NAMES + EVAL_NAMES]
    if any(name in TRAIN_NAMES for name in folders):
        ordered = sorted(folders, key=(TRAIN_NAMES + EVAL_NAMES).index)
        return {name: next(iter(_find_in_folder(path / name, table, folder).values())) for name in ordered}
    return {"all": partial(folder, path)}


def _find_in_files(files: list[str], table: Opener, location: str) -> dict[str, Opener]:
    groups = group_files(files, location)
    if files[0].endswith(".tar"):
        return {split: partial(ShardSource, members) for split, members in groups.items()}
    return {split: partial(table, members) for split, members in groups.items()}


def find_video_splits(
    path: str | Path,
    multi_label: bool | None = None,
    motions: int = 4096,
    size: int = 64,
    frames: int = 8,
    **_: Any,
) -> dict[str, Opener]:
    """Labelled videos. `motions` (number of training clips), `size` and `frames` are for the embedded dataset."""
    return _with_label_kind(_find_videos(path, motions, size, frames), multi_label)


def _find_videos(path: str | Path, motions: int, size: int, frames: int) -> dict[str, Opener]:
    if str(path) == EMBEDDED_VIDEOS:
        return embedded_splits(MotionSet, motions, max(len(MOTIONS), motions // 4), size, frames)
    path = Path(path)
    check_exists(path, "class folders of videos, a CSV list of files", EMBEDDED_VIDEOS)
    suffixes = (*LIST_SUFFIXES, ".txt")
    if path.is_file():
        if path.suffix not in suffixes:
            raise DataError(f"expected a list of videos ({', '.join(suffixes)}) or a folder, got {path}.")
        return {"all": partial(VideoList, path)}
    lists = {file.stem.lower(): file for suffix in suffixes for file in sorted(path.glob(f"*{suffix}"))}
    if names := [name for name in TRAIN_NAMES + EVAL_NAMES if name in lists]:
        return {name: partial(VideoList, lists[name]) for name in names}
    folders = [name for name in TRAIN_NAMES + EVAL_NAMES if (path / name).is_dir()]
    if any(name in TRAIN_NAMES for name in folders):
        return {name: partial(VideoFolder, path / name) for name in folders}
    return {"all": partial(VideoFolder, path)}
