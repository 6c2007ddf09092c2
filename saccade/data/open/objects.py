"""Images with objects at a path."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from saccade.data.open.splits import (
    EMBEDDED_IMAGES,
    check_exists,
    choose_split,
    embedded_splits,
    eval_split,
    files_matching,
    train_split,
)
from saccade.data.sources.base import DataError
from saccade.data.sources.coco import CocoSource, read_json
from saccade.data.sources.object_table import ObjectTable
from saccade.data.sources.objects import ObjectSource, hold_out_objects
from saccade.data.synthetic.scenes import SceneObjects


def open_train_and_val_objects(
    path: str | Path, val_path: str | Path | None = None, val_fraction: float = 0.1, seed: int = 0, **options: Any
) -> tuple[ObjectSource, ObjectSource]:
    """Training and validation sets. Without a validation split, `val_fraction` of the images is held out."""
    splits = find_object_splits(path, **options)
    train = train_split(splits)(classes=None)
    if val_path is not None:
        return train, open_object_split(val_path, None, train.classes, **options)
    if (open_val := eval_split(splits)) is not None:
        return train, open_val(classes=train.classes)
    return hold_out_objects(train, val_fraction, seed)


def open_object_split(
    path: str | Path, split: str | None = None, classes: list[str] | None = None, **options: Any
) -> ObjectSource:
    """One dataset: the requested split, else the one for evaluation, else everything."""
    return choose_split(find_object_splits(path, **options), split, path)(classes=classes)


def find_object_splits(
    path: str | Path, image_column: str | None = None, scenes: int = 512, size: int = 128
) -> dict[str, Callable[..., ObjectSource]]:
    """Images with objects. `scenes` (number of training images) and `size` are for the embedded dataset."""
    if str(path) == EMBEDDED_IMAGES:
        return embedded_splits(SceneObjects, scenes, max(10, scenes // 8), size)
    path = Path(path)
    check_exists(path, "a COCO JSON file, a folder with one, Parquet files", EMBEDDED_IMAGES)
    if path.is_file():
        return {"all": _object_opener(path, image_column)}
    for folder in (path / "annotations", path):
        files = sorted(folder.glob("*.json"))
        if files := [file for file in files if file.name.startswith("instances_")] or files:
            return {_coco_split_name(file.stem): _object_opener(file, image_column) for file in files}
    if files := sorted(path.glob("*/_annotations.coco.json")):  # Roboflow
        return {_coco_split_name(file.parent.name): _object_opener(file, image_column) for file in files}
    groups: dict[str, list[str]] = {}
    for file in files_matching(path, "*.parquet"):
        groups.setdefault(_coco_split_name(re.split(r"[-.]", Path(file).name)[0]), []).append(file)
    if groups:
        return {name: partial(ObjectTable, files, image_column) for name, files in groups.items()}
    raise DataError(f"expected COCO annotations (annotations/instances_train.json) or Parquet files in {path}.")


def _object_opener(file: Path, image_column: str | None) -> Callable[..., ObjectSource]:
    if file.suffix == ".parquet":
        return partial(ObjectTable, [file], image_column)
    if file.suffix != ".json":
        raise DataError(f"expected a COCO .json or a .parquet file, got {file}.")
    return partial(_open_coco, file)


def _open_coco(file: Path, classes: list[str] | None = None) -> CocoSource:
    return CocoSource(file, _coco_image_folder(file), classes)


def _coco_image_folder(file: Path) -> Path:
    """The folder with the images of an annotation file: named like the split, next to the file or one level up."""
    file_names = [entry["file_name"] for entry in read_json(file)["images"][:20]]
    if not file_names:
        raise DataError(f"{file} lists no images.")
    split = file.stem.removeprefix("instances_")
    names = dict.fromkeys((split, split.split("_")[0], _coco_split_name(split)))
    candidates = [
        root / folder
        for root in (file.parent.parent, file.parent)
        for folder in (*names, *(f"images/{name}" for name in names), "images", ".")
    ]
    for folder in candidates:
        if any((folder / name).is_file() for name in file_names):
            return folder
    raise DataError(
        f"cannot find the images of {file}: {file_names[0]} is neither in {candidates[0]} nor in {file.parent}."
    )


def _coco_split_name(text: str) -> str:
    """ "instances_train2017" -> "train"."""
    return re.sub(r"\d{4}$", "", text.removeprefix("instances_")).lower() or "all"
