"""A path -> pictures with objects: COCO's JSON, Parquet, or the embedded scenes, split by split."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from saccade.data.open import EMBEDDED, HELD_OUT, TRAIN
from saccade.data.sources.base import DataError
from saccade.data.sources.coco import CocoSource, read_json
from saccade.data.sources.object_table import TableObjects
from saccade.data.sources.objects import ObjectSource, SceneObjects, hold_out_objects

Opener = Callable[..., ObjectSource]  # called with classes=…


def open_objects(
    path: str | Path, val_path: str | Path | None = None, val_fraction: float = 0.1, seed: int = 0, **options: Any
) -> tuple[ObjectSource, ObjectSource]:
    """Training and validation set. Without a validation split, `val_fraction` of the pictures is held out."""
    splits = find_object_splits(path, **options)
    names = [name for name in TRAIN if name in splits]
    train = splits[names[0] if names else next(iter(splits))](classes=None)
    if val_path is not None:
        return train, open_object_split(val_path, None, train.classes, **options)
    if held := [name for name in HELD_OUT if name in splits]:
        return train, splits[held[0]](classes=train.classes)
    return hold_out_objects(train, val_fraction, seed)


def open_object_split(
    path: str | Path, split: str | None = None, classes: list[str] | None = None, **options: Any
) -> ObjectSource:
    """One set: the split asked for, else the held-out one, else all there is."""
    splits = find_object_splits(path, **options)
    if split is None:
        split = next((name for name in HELD_OUT if name in splits), next(iter(splits)))
    elif split not in splits:
        raise DataError(f"{path} has no split {split!r}; it has {', '.join(splits)}.")
    return splits[split](classes=classes)


def find_object_splits(
    path: str | Path, image_column: str | None = None, scenes: int = 512, size: int = 128
) -> dict[str, Opener]:
    """What lies at `path`; a path without splits is one split named "all"."""
    if str(path) == EMBEDDED:
        counts = {"train": scenes, "val": max(10, scenes // 8), "test": max(10, scenes // 8)}
        return {split: partial(_scenes, count, size, split) for split, count in counts.items()}
    path = Path(path)
    if not path.exists():
        raise DataError(f"no data at {path}: expected COCO's JSON, a folder with it, Parquet, or {EMBEDDED!r}.")
    if path.is_file():
        return {"all": _open_file(path, image_column)}
    for folder in (path / "annotations", path):
        files = sorted(folder.glob("*.json"))
        files = [file for file in files if file.name.startswith("instances_")] or files
        if files:
            return {_split_name(file.stem): _open_file(file, image_column) for file in files}
    if files := sorted(path.glob("*/_annotations.coco.json")):
        return {_split_name(file.parent.name): _open_file(file, image_column) for file in files}
    for folder in (path, path / "data"):
        groups: dict[str, list[Path]] = {}
        for file in sorted(folder.glob("*.parquet")):
            groups.setdefault(_split_name(re.split(r"[-.]", file.name)[0]), []).append(file)
        if groups:
            return {name: partial(TableObjects, files, image_column) for name, files in groups.items()}
    raise DataError(f"{path} holds neither COCO's annotations (annotations/instances_train.json) nor Parquet files.")


def _open_file(file: Path, image_column: str | None) -> Opener:
    if file.suffix == ".parquet":
        return partial(TableObjects, [file], image_column)
    if file.suffix != ".json":
        raise DataError(f"{file}: expected COCO's .json or a .parquet file.")
    return partial(_open_coco, file)


def _open_coco(file: Path, classes: list[str] | None = None) -> CocoSource:
    return CocoSource(file, picture_folder(file), classes)


def picture_folder(file: Path) -> Path:
    """Where the pictures of an annotation file lie: in a folder named as its split, beside it or one level up."""
    first = [entry["file_name"] for entry in read_json(file)["images"][:20]]
    split = file.stem.removeprefix("instances_")
    names = dict.fromkeys((split, split.split("_")[0], _split_name(split)))
    tried = [
        root / folder
        for root in (file.parent.parent, file.parent)
        for folder in (*names, *(f"images/{name}" for name in names), "images", ".")
    ]
    for folder in tried:
        if any((folder / name).is_file() for name in first):
            return folder
    if not first:
        raise DataError(f"{file} lists no images.")
    raise DataError(
        f"the pictures of {file} are nowhere near it: {first[0]} is neither in {tried[0]} nor in {file.parent}."
    )


def _split_name(text: str) -> str:
    """ "instances_train2017" -> "train"."""
    return re.sub(r"\d{4}$", "", text.removeprefix("instances_")).lower() or "all"


def _scenes(count: int, size: int, split: str, classes: list[str] | None = None) -> SceneObjects:
    return SceneObjects(count, size, split)
