"""Pictures and masks in two folders: ADE20K, COCO-Stuff, LIP, Cityscapes, and any pair of folders with equal names."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from saccade.data.decode.image import IMAGE_SUFFIXES, BadImage, read_image
from saccade.data.sources.base import DataError
from saccade.data.sources.class_names import (
    ADE20K,
    CITYSCAPES,
    CITYSCAPES_NUMBERS,
    COCO_NUMBERS,
    COCO_STUFF,
    COCO_STUFF_NUMBERS,
    COCO_THINGS,
    LIP,
)
from saccade.data.sources.masks import IGNORE, Numbering, decode_mask

SPLITS = {"train": "train", "training": "train", "val": "val", "validation": "val", "valid": "val", "test": "test"}
SPLITS |= {"train2017": "train", "val2017": "val", "testing": "test"}
IMAGES = ("images", "image", "imgs", "img", "JPEGImages")
MASKS = ("annotations", "masks", "mask", "labels", "segmentations", "SegmentationClass", "gt")
FEW = 2000  # masks that are read to count classes when nothing names them


class Layout(NamedTuple):
    """How a known set lies on disk; `{split}` stands for one of `splits`, such as {"train": "training"}."""

    images: str
    masks: str
    splits: Mapping[str, str]
    classes: list[str]
    image_tail: str = ""  # ends of file names, before the suffix, that differ between picture and mask
    mask_tail: str = ""
    numbers: Mapping[int, int] | None = None
    zero_is_unlabelled: bool = False


_PLAIN, _2017 = {"train": "train", "val": "val", "test": "test"}, {"train": "train2017", "val": "val2017"}
LAYOUTS: dict[str, Layout] = {
    "ade20k": Layout(
        "images/{split}",
        "annotations/{split}",
        {"train": "training", "val": "validation"},
        ADE20K,
        zero_is_unlabelled=True,
    ),
    "cityscapes": Layout(
        "leftImg8bit/{split}",
        "gtFine/{split}",
        _PLAIN,
        CITYSCAPES,
        "_leftImg8bit",
        "_gtFine_labelIds",
        CITYSCAPES_NUMBERS,
    ),
    "cityscapes_train_ids": Layout(
        "leftImg8bit/{split}", "gtFine/{split}", _PLAIN, CITYSCAPES, "_leftImg8bit", "_gtFine_labelTrainIds"
    ),
    "coco_stuff": Layout(
        "{split}", "stuff_{split}_pixelmaps", _2017, COCO_STUFF, numbers=COCO_STUFF_NUMBERS
    ),  # 91 classes of stuff, as in VT's Table 9
    "coco_stuff_things": Layout(
        "images/{split}", "annotations/{split}", _2017, COCO_THINGS + COCO_STUFF, numbers=COCO_NUMBERS
    ),
    "lip": Layout("{split}_images", "{split}_segmentations", _PLAIN, LIP),
    "lip_archives": Layout(
        "TrainVal_images/{split}_images", "TrainVal_parsing_annotations/{split}_segmentations", _PLAIN, LIP
    ),
}


class MaskFolders:
    """A folder of pictures and one of masks; a mask has its picture's path, but for the ends of the names."""

    def __init__(
        self,
        images: str | Path,
        masks: str | Path,
        classes: list[str],
        numbering: Numbering | None = None,
        image_tail: str = "",
        mask_tail: str = "",
    ):
        self.images, self.masks, self.classes = Path(images), Path(masks), classes
        self.numbering = numbering or Numbering(len(classes))
        pictures = _found(self.images, image_tail)
        answers = _found(self.masks, mask_tail, required=bool(mask_tail))
        lonely = sorted(set(pictures) - set(answers))
        if lonely or not pictures:
            what = f"{len(lonely)} of {len(pictures)} pictures have no mask" if pictures else "there are no pictures"
            example = f": {self.images / pictures[lonely[0]]} needs {lonely[0]}{mask_tail}.png" if lonely else ""
            raise DataError(
                f"{what} in {self.masks if pictures else self.images}{example}. Add them or remove the rest."
            )
        if extra := sorted(set(answers) - set(pictures)):
            first = self.masks / answers[extra[0]]
            raise DataError(f"{len(extra)} of {len(answers)} masks have no picture in {self.images}: {first}.")
        self.pairs = [(pictures[key], answers[key]) for key in sorted(pictures)]

    def __len__(self) -> int:
        return len(self.pairs)

    def read(self, index: int) -> Image.Image:
        return read_image(self.images / self.pairs[index][0])

    def read_mask(self, index: int) -> np.ndarray:
        path = self.masks / self.pairs[index][1]
        return self.numbering(decode_mask(path, str(path)), str(path))

    def name(self, index: int) -> str:
        return str(self.images / self.pairs[index][0])


def _found(folder: Path, tail: str, required: bool = False) -> dict[str, str]:
    """Key (path without suffix and tail) -> path, of the pictures under a folder; `required`: only with its tail."""
    found: dict[str, str] = {}
    for where, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if name[0] != "."]
        for name in files:
            if name[0] == "." or os.path.splitext(name)[1].lower() not in IMAGE_SUFFIXES:
                continue
            path = os.path.relpath(os.path.join(where, name), folder)
            stem = os.path.splitext(path)[0]
            if required and not stem.endswith(tail):
                continue
            key = stem.removesuffix(tail)
            if key in found:
                raise DataError(f"two files are called {key} in {folder}: {found[key]} and {path}. Remove one.")
            found[key] = path
    return found


class Splits(NamedTuple):
    """Where the splits of a set lie."""

    layout: Layout
    folders: dict[str, tuple[Path, Path]]  # split -> pictures, masks


def find_layout(path: Path, wanted: str = "auto") -> Splits | None:
    """The known layout that lies at `path`, or the pair of folders; None if there is neither."""
    if wanted not in ("auto", "folders", *LAYOUTS):
        raise DataError(f"data.layout must be auto, folders, {', '.join(LAYOUTS)}; got {wanted!r}.")
    for name, layout in LAYOUTS.items():
        if wanted in ("auto", name) and (folders := _splits_of(path, layout)):
            return Splits(layout, folders)
    if wanted in ("auto", "folders") and (folders := dict(_pairs_under(path))):
        return Splits(Layout("", "", {}, []), folders)
    if wanted != "auto":
        raise DataError(f"{path} has not the layout {wanted}: " + _expected(wanted))
    return None


def _expected(name: str) -> str:
    if name == "folders":
        return f"expected a folder of pictures ({', '.join(IMAGES[:3])}) beside one of masks ({', '.join(MASKS[:3])})."
    layout = LAYOUTS[name]
    split = layout.splits["train"]
    return f"expected {layout.images.format(split=split)} and {layout.masks.format(split=split)} in it."


def _splits_of(path: Path, layout: Layout) -> dict[str, tuple[Path, Path]]:
    folders = {
        split: (path / layout.images.format(split=name), path / layout.masks.format(split=name))
        for split, name in layout.splits.items()
    }
    there = {split: pair for split, pair in folders.items() if pair[0].is_dir() and pair[1].is_dir()}
    if layout.mask_tail and there:  # two sets share these folders and differ in the names of their masks
        masks = next(iter(there.values()))[1]
        return there if next(masks.rglob(f"*{layout.mask_tail}.*"), None) else {}
    return there


def _pairs_under(path: Path) -> Iterator[tuple[str, tuple[Path, Path]]]:
    """images/train + masks/train, or train/images + train/masks, or images + masks alone."""
    for images, masks in _pairs_in(path):
        inside = [entry.name for entry in sorted(images.iterdir()) if entry.name in SPLITS and entry.is_dir()]
        for name in inside:
            if (masks / name).is_dir():
                yield SPLITS[name], (images / name, masks / name)
        if not inside:
            yield "all", (images, masks)
        return
    for entry in sorted(path.iterdir()) if path.is_dir() else []:
        if entry.name in SPLITS and entry.is_dir():
            for pair in _pairs_in(entry):
                yield SPLITS[entry.name], pair


def _pairs_in(path: Path) -> Iterator[tuple[Path, Path]]:
    images = next((path / name for name in IMAGES if (path / name).is_dir()), None)
    masks = next((path / name for name in MASKS if (path / name).is_dir()), None)
    if images is not None and masks is not None:
        yield images, masks


def names_beside(path: Path) -> list[str] | None:
    """Class names written down in classes.txt (one a line) or id2label.json (number to name)."""
    if (path / "classes.txt").is_file():
        return [line.strip() for line in (path / "classes.txt").read_text().splitlines() if line.strip()]
    if (path / "id2label.json").is_file():
        found = {int(number): name for number, name in json.loads((path / "id2label.json").read_text()).items()}
        if sorted(found) != list(range(len(found))):
            raise DataError(f"{path / 'id2label.json'} must number the classes from 0 on, got {sorted(found)[:5]}, ….")
        return [found[number] for number in range(len(found))]
    return None


def count_classes(masks: Path, ignore: int = IGNORE, zero_is_unlabelled: bool = False) -> list[str]:
    """Numbers for names, from the masks themselves: for small sets."""
    files = [masks / name for name in sorted(_found(masks, "").values())]
    if len(files) > FEW:
        raise DataError(f"nothing names the classes of {masks}: write one name a line into classes.txt beside it.")
    top = -1
    for file in files:
        try:
            values = decode_mask(file, str(file))
        except BadImage:
            continue  # reported when the pictures are read
        values = values[values != ignore]
        top = max(top, int(values.max(initial=-1)))
    return [str(number) for number in range(top + (0 if zero_is_unlabelled else 1))]
