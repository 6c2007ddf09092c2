"""A path -> training and validation sources for segmentation; says so when it is nothing known."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from saccade.data.open import EMBEDDED, HELD_OUT, TRAIN, group_files
from saccade.data.sources.base import DataError
from saccade.data.sources.mask_folders import MaskFolders, Splits, count_classes, find_layout, names_beside
from saccade.data.sources.mask_table import MaskTable
from saccade.data.sources.masks import IGNORE, MaskSource, Numbering, SceneMasks, check_masks, hold_out

Opener = Callable[[], MaskSource]


def open_train_and_val_masks(
    path: str | Path, val_path: str | Path | None = None, val_fraction: float = 0.1, seed: int = 0, **options: Any
) -> tuple[MaskSource, MaskSource]:
    """Both sources, checked. Without a validation split, `val_fraction` of the pictures are held out."""
    splits = find_mask_splits(path, **options)
    names = [name for name in TRAIN if name in splits]
    train: MaskSource = splits[names[0] if names else next(iter(splits))]()
    if val_path is not None:
        held: MaskSource = open_mask_split(val_path, None, **(options | {"classes": train.classes}))
    elif held_names := [name for name in HELD_OUT if name in splits]:
        held = splits[held_names[0]]()
    else:
        train, held = hold_out(train, val_fraction, seed)
    check_masks(train, "training")
    check_masks(held, "validation")
    if held.classes != train.classes:
        raise DataError(f"the validation set has {len(held.classes)} classes, the training set {len(train.classes)}.")
    return train, held


def open_mask_split(path: str | Path, split: str | None = None, **options: Any) -> MaskSource:
    """One source: the split asked for, else the held-out one, else all there is."""
    splits = find_mask_splits(path, **options)
    if split is None:
        split = next((name for name in HELD_OUT if name in splits), next(iter(splits)))
    elif split not in splits:
        raise DataError(f"{path} has no split {split!r}; it has {', '.join(splits)}.")
    return splits[split]()


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
) -> dict[str, Opener]:
    """What lies at `path`, split by split: Parquet, a known layout, a pair of folders, or the embedded scenes."""
    if str(path) == EMBEDDED:
        counts = {"train": scenes, "val": max(10, scenes // 4), "test": max(10, scenes // 4)}
        return {split: partial(SceneMasks, count, size, split) for split, count in counts.items()}
    path = Path(path)
    if not path.exists():
        raise DataError(f"no data at {path}: expected a folder with pictures and masks, Parquet, or {EMBEDDED!r}.")
    files = [path] if path.is_file() else sorted(path.glob("*.parquet")) or sorted(path.glob("data/*.parquet"))
    zero = bool(reduce_zero_label)
    if files:
        names = classes or (names_beside(path) if path.is_dir() else None)
        columns = {"image_column": image_column, "mask_column": mask_column}
        about = {"classes": names, "ignore": ignore_index, "zero_is_unlabelled": zero}
        groups = group_files([str(file) for file in files], str(path))
        return {split: partial(MaskTable, members, **columns, **about) for split, members in groups.items()}
    found = find_layout(path, layout)
    if found is None:
        raise DataError(
            f"{path} is no segmentation set: expected a folder of pictures beside one of masks (images/ and masks/, "
            "each perhaps with train/ and val/), the layout of ADE20K, COCO-Stuff, LIP or Cityscapes, or Parquet."
        )
    return _from_folders(path, found, classes, ignore_index, reduce_zero_label)


def _from_folders(
    path: Path, found: Splits, classes: list[str] | None, ignore_index: int | None, reduce_zero_label: bool | None
) -> dict[str, Opener]:
    layout, ignore = found.layout, IGNORE if ignore_index is None else ignore_index
    names = classes or names_beside(path) or layout.classes
    own = names == layout.classes  # another list of classes means another numbering
    zero = (own and layout.zero_is_unlabelled) if reduce_zero_label is None else reduce_zero_label
    if not names:
        first = found.folders.get("train") or next(iter(found.folders.values()))
        names = count_classes(first[1], ignore, zero)
    numbering = Numbering(len(names), layout.numbers if own else None, zero, ignore)
    return {
        split: partial(MaskFolders, images, masks, names, numbering, layout.image_tail, layout.mask_tail)
        for split, (images, masks) in found.folders.items()
    }
