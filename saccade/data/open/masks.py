"""Images with masks at a path."""

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
    group_files,
    train_split,
)
from saccade.data.sources.base import DataError, read_class_names
from saccade.data.sources.mask_folders import LayoutMatch, MaskFolders, count_classes, find_layout
from saccade.data.sources.mask_table import MaskTable
from saccade.data.sources.masks import IGNORE, LabelMap, MaskSource, check_masks, hold_out_masks
from saccade.data.synthetic.scenes import SceneMasks


def open_train_and_val_masks(
    path: str | Path, val_path: str | Path | None = None, val_fraction: float = 0.1, seed: int = 0, **options: Any
) -> tuple[MaskSource, MaskSource]:
    """Training and validation sets, checked. Without a validation split, `val_fraction` of the pairs is held out."""
    splits = find_mask_splits(path, **options)
    train: MaskSource = train_split(splits)()
    val: MaskSource
    if val_path is not None:
        val = open_mask_split(val_path, None, **(options | {"classes": train.classes}))
    elif (open_val := eval_split(splits)) is not None:
        val = open_val()
    else:
        train, val = hold_out_masks(train, val_fraction, seed)
    check_masks(train, "training")
    check_masks(val, "validation")
    if val.classes != train.classes:
        raise DataError(f"the validation set has {len(val.classes)} classes, the training set {len(train.classes)}.")
    return train, val


def open_mask_split(path: str | Path, split: str | None = None, **options: Any) -> MaskSource:
    """One dataset: the requested split, else the one for evaluation, else everything."""
    return choose_split(find_mask_splits(path, **options), split, path)()


def find_mask_splits(
    path: str | Path,
    layout: str = "auto",
    classes: list[str] | None = None,
    ignore_index: int | None = None,
    reduce_zero_label: bool | None = None,
    image_column: str | None = None,
    mask_column: str | None = None,
    scenes: int = 2048,
    size: int = 64,
) -> dict[str, Callable[[], MaskSource]]:
    """Images with masks. `scenes` (number of training images) and `size` are for the embedded dataset."""
    if str(path) == EMBEDDED_IMAGES:
        return embedded_splits(SceneMasks, scenes, max(10, scenes // 4), size)
    path = Path(path)
    check_exists(path, "a folder with images and masks, Parquet files", EMBEDDED_IMAGES)
    if files := [str(path)] if path.is_file() else files_matching(path, "*.parquet"):
        names = classes or (read_class_names(path) if path.is_dir() else None)
        options = (image_column, mask_column, names, ignore_index, bool(reduce_zero_label))
        return {split: partial(MaskTable, files, *options) for split, files in group_files(files, str(path)).items()}
    match = find_layout(path, layout)
    if match is None:
        raise DataError(
            f"{path} is not a segmentation dataset: expected a folder of images and one of masks (images/ and masks/, "
            "optionally with train/ and val/), the layout of ADE20K, COCO-Stuff, LIP or Cityscapes, or Parquet files."
        )
    return _mask_folder_splits(path, match, classes, ignore_index, reduce_zero_label)


def _mask_folder_splits(
    path: Path,
    match: LayoutMatch,
    classes: list[str] | None,
    ignore_index: int | None,
    reduce_zero_label: bool | None,
) -> dict[str, Callable[[], MaskSource]]:
    layout, ignore = match.layout, IGNORE if ignore_index is None else ignore_index
    names = classes or read_class_names(path) or layout.classes
    is_default = names == layout.classes  # the label convention of a layout applies to its own classes only
    reduce_zero = (is_default and layout.reduce_zero_label) if reduce_zero_label is None else reduce_zero_label
    if not names:
        first = match.folders.get("train") or next(iter(match.folders.values()))
        names = count_classes(first[1], ignore, reduce_zero)
    label_map = LabelMap(len(names), layout.mapping if is_default else None, reduce_zero, ignore)
    return {
        split: partial(MaskFolders, images, masks, names, label_map, layout.image_ending, layout.mask_ending)
        for split, (images, masks) in match.folders.items()
    }
