"""Images and masks in two folders: ADE20K, COCO-Stuff, LIP, Cityscapes, and any two folders with matching names."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from saccade._extras import printable
from saccade.data.decode.image import IMAGE_SUFFIXES, read_image
from saccade.data.sources.base import DataError
from saccade.data.sources.class_names import (
    ADE20K,
    CITYSCAPES,
    CITYSCAPES_LABEL_IDS,
    COCO_IDS,
    COCO_PANOPTIC_IDS,
    COCO_PANOPTIC_STUFF,
    COCO_STUFF,
    COCO_STUFF_IDS,
    COCO_THINGS,
    LIP,
)
from saccade.data.sources.folder import walk_files
from saccade.data.sources.masks import LabelMap

SPLIT_NAMES = {"train": "train", "training": "train", "val": "val", "validation": "val", "valid": "val", "test": "test"}
SPLIT_NAMES |= {"train2017": "train", "val2017": "val", "testing": "test"}
IMAGE_FOLDERS = ("images", "image", "imgs", "img", "JPEGImages")
MASK_FOLDERS = ("annotations", "masks", "mask", "labels", "segmentations", "SegmentationClass", "gt")


class Layout(NamedTuple):
    """Folder structure and label convention of a dataset. `{split}` is replaced by the values of `splits`."""

    images: str
    masks: str
    splits: Mapping[str, str]
    classes: list[str]
    image_ending: str = ""  # of the file stem, where images and masks differ
    mask_ending: str = ""
    mapping: Mapping[int, int] | None = None  # file value -> class
    reduce_zero_label: bool = False


_SPLITS, _SPLITS_2017 = {"train": "train", "val": "val", "test": "test"}, {"train": "train2017", "val": "val2017"}
LAYOUTS: dict[str, Layout] = {
    "ade20k": Layout(
        "images/{split}",
        "annotations/{split}",
        {"train": "training", "val": "validation"},
        ADE20K,
        reduce_zero_label=True,
    ),
    "cityscapes": Layout(
        "leftImg8bit/{split}",
        "gtFine/{split}",
        _SPLITS,
        CITYSCAPES,
        "_leftImg8bit",
        "_gtFine_labelIds",
        CITYSCAPES_LABEL_IDS,
    ),
    "cityscapes_train_ids": Layout(
        "leftImg8bit/{split}", "gtFine/{split}", _SPLITS, CITYSCAPES, "_leftImg8bit", "_gtFine_labelTrainIds"
    ),
    "coco_stuff": Layout(
        "{split}", "stuff_{split}_pixelmaps", _SPLITS_2017, COCO_STUFF, mapping=COCO_STUFF_IDS
    ),  # the 91 stuff classes of VT Table 9
    "coco_stuff_things": Layout(
        "images/{split}", "annotations/{split}", _SPLITS_2017, COCO_THINGS + COCO_STUFF, mapping=COCO_IDS
    ),
    "coco_stuff_merged": Layout(
        "images/{split}", "annotations/{split}", _SPLITS_2017, COCO_PANOPTIC_STUFF, mapping=COCO_PANOPTIC_IDS
    ),  # the same files with the 54 classes of panoptic FPN; only on request
    "coco_panoptic_stuff": Layout("{split}", "panoptic_stuff_{split}", _SPLITS_2017, COCO_PANOPTIC_STUFF),
    "lip": Layout("{split}_images", "{split}_segmentations", _SPLITS, LIP),
    "lip_archives": Layout(
        "TrainVal_images/{split}_images", "TrainVal_parsing_annotations/{split}_segmentations", _SPLITS, LIP
    ),
}


class MaskFolders:
    """A folder of images and one of masks with the same relative paths, except for suffixes and stem endings."""

    def __init__(
        self,
        images: str | Path,
        masks: str | Path,
        classes: list[str],
        label_map: LabelMap | None = None,
        image_ending: str = "",
        mask_ending: str = "",
    ):
        self.images, self.masks, self.classes = Path(images), Path(masks), classes
        self.label_map = label_map or LabelMap(len(classes))
        image_paths = _index_folder(self.images, image_ending)
        mask_paths = _index_folder(self.masks, mask_ending, required=bool(mask_ending))
        if not image_paths:
            raise DataError(f"expected images in {self.images}, got none.")
        if missing := sorted(set(image_paths) - set(mask_paths)):
            example = f"{self.images / image_paths[missing[0]]} needs {missing[0]}{mask_ending}.png"
            raise DataError(
                f"{len(missing)} of {len(image_paths)} images have no mask in {self.masks}: {example}. "
                "Add the masks or remove the images."
            )
        if extra := sorted(set(mask_paths) - set(image_paths)):
            example = self.masks / mask_paths[extra[0]]
            raise DataError(f"{len(extra)} of {len(mask_paths)} masks have no image in {self.images}: {example}.")
        self.pairs = [(image_paths[key], mask_paths[key]) for key in sorted(image_paths)]

    def __len__(self) -> int:
        return len(self.pairs)

    def read(self, index: int) -> Image.Image:
        return read_image(self.images / self.pairs[index][0])

    def read_mask(self, index: int) -> np.ndarray:
        path = self.masks / self.pairs[index][1]
        return self.label_map.read(path, str(path))

    def name(self, index: int) -> str:
        return printable(self.images / self.pairs[index][0])


def _index_folder(folder: Path, ending: str, required: bool = False) -> dict[str, str]:
    """Path without suffix and `ending` -> path. With `required`, files without the ending are skipped."""
    paths: dict[str, str] = {}
    for path in walk_files(folder, IMAGE_SUFFIXES):
        stem = os.path.splitext(path)[0]
        if required and not stem.endswith(ending):
            continue
        key = stem.removesuffix(ending)
        if key in paths:
            raise DataError(f"expected one file named {key} in {folder}, got {paths[key]} and {path}. Remove one.")
        paths[key] = path
    return paths


class LayoutMatch(NamedTuple):
    """A layout and the folders that match it."""

    layout: Layout
    folders: dict[str, tuple[Path, Path]]  # split -> images, masks


def find_layout(path: Path, requested: str = "auto") -> LayoutMatch | None:
    """The known layout at `path`, or a pair of image and mask folders; None if there is neither."""
    if requested not in ("auto", "folders", *LAYOUTS):
        raise DataError(f"expected data.layout to be auto, folders, {', '.join(LAYOUTS)}; got {requested!r}.")
    for name, layout in LAYOUTS.items():
        if requested in ("auto", name) and (folders := _match_layout(path, layout)):
            return LayoutMatch(layout, folders)
    if requested in ("auto", "folders") and (folders := dict(_find_pairs(path))):
        return LayoutMatch(Layout("", "", {}, []), folders)
    if requested != "auto":
        raise DataError(f"{path} does not have the layout {requested}: expected {_describe_layout(requested)}.")
    return None


def _describe_layout(name: str) -> str:
    if name == "folders":
        return f"an image folder ({', '.join(IMAGE_FOLDERS[:3])}) and a mask folder ({', '.join(MASK_FOLDERS[:3])})"
    layout = LAYOUTS[name]
    split = layout.splits["train"]
    return f"the folders {layout.images.format(split=split)} and {layout.masks.format(split=split)}"


def _match_layout(path: Path, layout: Layout) -> dict[str, tuple[Path, Path]]:
    folders = {
        split: (path / layout.images.format(split=name), path / layout.masks.format(split=name))
        for split, name in layout.splits.items()
    }
    existing = {split: pair for split, pair in folders.items() if pair[0].is_dir() and pair[1].is_dir()}
    if layout.mask_ending and existing:  # both Cityscapes layouts have these folders and differ in the mask files
        masks = next(iter(existing.values()))[1]
        return existing if next(masks.rglob(f"*{layout.mask_ending}.*"), None) else {}
    return existing


def _find_pairs(path: Path) -> Iterator[tuple[str, tuple[Path, Path]]]:
    """images/train + masks/train, or train/images + train/masks, or images + masks without splits."""
    if (pair := _pair_in(path)) is not None:
        images, masks = pair
        splits = [entry.name for entry in sorted(images.iterdir()) if entry.name in SPLIT_NAMES and entry.is_dir()]
        for name in splits:
            if (masks / name).is_dir():
                yield SPLIT_NAMES[name], (images / name, masks / name)
        if not splits:
            yield "all", (images, masks)
        return
    for entry in sorted(path.iterdir()) if path.is_dir() else []:
        if entry.name in SPLIT_NAMES and entry.is_dir() and (pair := _pair_in(entry)) is not None:
            yield SPLIT_NAMES[entry.name], pair


def _pair_in(path: Path) -> tuple[Path, Path] | None:
    images = next((path / name for name in IMAGE_FOLDERS if (path / name).is_dir()), None)
    masks = next((path / name for name in MASK_FOLDERS if (path / name).is_dir()), None)
    return (images, masks) if images is not None and masks is not None else None


def list_masks(folder: Path, ending: str = "") -> list[tuple[Path, str]]:
    """Path and name of every mask in a folder; `ending`: of the file stem."""
    paths = [folder / path for path in sorted(_index_folder(folder, ending, required=bool(ending)).values())]
    return [(path, str(path)) for path in paths]
