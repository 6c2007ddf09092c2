"""Images with masks at a path."""

from functools import partial
from pathlib import Path

from saccade.data.open.splits import (
    EMBEDDED_IMAGES,
    Opener,
    check_exists,
    embedded_splits,
    files_matching,
    group_files,
)
from saccade.data.sources.base import DataError, read_class_names
from saccade.data.sources.mask_folders import MaskFolders, find_layout, list_masks
from saccade.data.sources.mask_table import MaskTable
from saccade.data.sources.masks import LabelMap, choose_labels
from saccade.data.synthetic.scenes import SceneMasks


def find_mask_splits(
    path: str | Path,
    layout: str = "auto",
    classes: list[str] | None = None,
    ignore_index: int | None = None,
    reduce_zero_label: bool | None = None,
    mask_values: list[int] | list[str] | None = None,
    image_column: str | None = None,
    mask_column: str | None = None,
    scenes: int = 2048,
    size: int = 64,
) -> dict[str, Opener]:
    """Images with masks. `mask_values`: see `choose_labels`.

    `scenes` (number of training images) and `size` are for the embedded dataset.
    """
    if str(path) == EMBEDDED_IMAGES:
        return embedded_splits(SceneMasks, scenes, max(10, scenes // 4), size)
    path = Path(path)
    check_exists(path, "a folder with images and masks, Parquet files", EMBEDDED_IMAGES)
    if files := [str(path)] if path.is_file() else files_matching(path, "*.parquet"):
        names = classes or (read_class_names(path) if path.is_dir() else None)
        options = (image_column, mask_column, names, mask_values, ignore_index, bool(reduce_zero_label))
        return {split: partial(MaskTable, files, *options) for split, files in group_files(files, str(path)).items()}
    match = find_layout(path, layout)
    if match is None:
        raise DataError(
            f"{path} is not a segmentation dataset: expected a folder of images and one of masks (images/ and masks/, "
            "optionally with train/ and val/), the layout of ADE20K, COCO-Stuff, LIP or Cityscapes, or Parquet files."
        )
    recognised, requested = match.layout, classes

    def open_folders(split: str, classes: list[str] | None = None) -> MaskFolders:
        names = requested or read_class_names(path) or classes or recognised.classes
        is_default = bool(recognised.classes) and names == recognised.classes and mask_values is None
        reduce_zero = (is_default and recognised.reduce_zero_label) if reduce_zero_label is None else reduce_zero_label
        if is_default:  # the label convention of a layout applies to its own classes only
            label_map = LabelMap(len(names), recognised.mapping, reduce_zero, ignore_index)
        else:
            folder = (match.folders.get("train") or next(iter(match.folders.values())))[1]
            listed = list_masks(folder, recognised.mask_ending)
            options = (str(folder), names, mask_values, ignore_index, reduce_zero)
            names, label_map = choose_labels(len(listed), listed.__getitem__, *options)
        images, masks = match.folders[split]
        return MaskFolders(images, masks, names, label_map, recognised.image_ending, recognised.mask_ending)

    return {split: partial(open_folders, split) for split in match.folders}
