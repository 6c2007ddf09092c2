"""Boxes in one text file per image: YOLO's .txt and Pascal VOC's .xml."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from saccade._extras import printable
from saccade.data.decode.image import IMAGE_SUFFIXES, read_image
from saccade.data.sources.base import DataError, check_known_classes
from saccade.data.sources.folder import walk_files
from saccade.data.sources.objects import Objects, to_coco

MAX_XML_BYTES = 10_000_000


class Boxes(NamedTuple):
    """The content of one file."""

    boxes: np.ndarray  # (n, 4) float32: x0 y0 x1 y1, in pixels or relative to the image
    names: list[Any]  # class name or index of each box
    crowd: list[bool]  # excluded from training and metric


class BoxFiles:
    """Images, each with a file of boxes; an image without one has no objects.

    Args:
        pairs: image and annotation file of every image.
        parse: annotation file -> boxes.
        names: class names by the values that `parse` returns; None if it returns names.
        relative: boxes are relative to width and height.
        classes: class names of another split.
    """

    has_masks = False

    def __init__(
        self,
        pairs: Sequence[tuple[Path, Path]],
        parse: Callable[[Path], Boxes],
        names: Mapping[int, str] | None = None,
        relative: bool = False,
        classes: list[str] | None = None,
    ):
        if not pairs:
            raise DataError("expected images with boxes, got no image.")
        self.paths, self.relative = [str(image) for image, _ in pairs], relative
        parsed = [parse(file) if file.is_file() else Boxes(np.zeros((0, 4), np.float32), [], []) for _, file in pairs]
        values_used = {value for content in parsed for value in content.names}
        if names is None:
            names = {value: str(value) for value in sorted(values_used)}
        if unnamed := values_used - set(names):
            raise DataError(f"expected classes {min(names)} to {max(names)} as named, got {max(unnamed)}.")
        own = [names[value] for value in sorted(names)]
        check_known_classes(set(own), classes or own, str(pairs[0][1].parent))
        self.classes = list(classes or own)
        if not self.classes:
            raise DataError(f"expected boxes in {pairs[0][1].parent}, got none.")
        index = {value: self.classes.index(name) + 1 for value, name in names.items()}
        self.category_ids = list(range(1, len(self.classes) + 1))
        self.image_ids = np.arange(1, len(pairs) + 1)
        self._starts = np.cumsum([0] + [len(content.names) for content in parsed])
        self._boxes = np.concatenate([content.boxes for content in parsed]).astype(np.float32)
        self._labels = np.array([index[value] for content in parsed for value in content.names], np.int64)
        self._crowd = np.array([value for content in parsed for value in content.crowd], bool)

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> Image.Image:
        return read_image(self.paths[index])

    def name(self, index: int) -> str:
        return printable(self.paths[index])

    def objects(self, index: int, size: tuple[int, int]) -> Objects:
        part = slice(self._starts[index], self._starts[index + 1])
        boxes = self._boxes[part] * (np.tile(np.array(size, np.float32), 2) if self.relative else np.float32(1))
        ids = np.arange(part.start + 1, part.stop + 1)
        return Objects(boxes, self._labels[part], None, self._crowd[part], ids)

    def ground_truth(self) -> dict[str, Any]:
        return to_coco(self)


def parse_yolo(file: Path) -> Boxes:
    """Lines `class x y width height`, relative, with the centre of the box; or `class x y x y x y …`, a polygon."""
    boxes, labels = [], []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            label, *values = (float(word) for word in line.split())
            if not np.isfinite(values).all() or not label.is_integer() or label < 0:
                raise ValueError
            if len(values) == 4:
                x, y, width, height = values
                boxes.append((x - width / 2, y - height / 2, x + width / 2, y + height / 2))
            elif len(values) >= 6 and len(values) % 2 == 0:
                boxes.append((min(values[::2]), min(values[1::2]), max(values[::2]), max(values[1::2])))
            else:
                raise ValueError
        except ValueError:
            raise DataError(f"{file}, line {number}: expected class x y width height, got {line[:60]!r}.") from None
        labels.append(int(label))
    return Boxes(np.array(boxes, np.float32).reshape(-1, 4), labels, [False] * len(labels))


def parse_voc(file: Path) -> Boxes:
    """Objects of a Pascal VOC file; corners are pixel indices from 1, objects marked difficult count as crowds."""
    root = _parse_xml(file)
    boxes, names, crowd = [], [], []
    for entry in root.iter("object"):
        names.append((entry.findtext("name") or "").strip())
        try:
            corners = [float(entry.findtext(f"bndbox/{key}") or "") for key in ("xmin", "ymin", "xmax", "ymax")]
        except ValueError:
            raise DataError(f"{file}: expected bndbox with xmin, ymin, xmax, ymax in object {len(names)}.") from None
        if not names[-1] or not np.isfinite(corners).all():
            raise DataError(f"{file}: expected a name and finite corners in object {len(names)}.")
        boxes.append(np.subtract(corners, (1, 1, 0, 0)))
        crowd.append((entry.findtext("difficult") or "0").strip() == "1")
    return Boxes(np.array(boxes, np.float32).reshape(-1, 4), names, crowd)


def _parse_xml(file: Path) -> ElementTree.Element:
    """The root element. Document types are refused, since their entities can expand without bound."""
    try:
        if file.stat().st_size > MAX_XML_BYTES:
            raise DataError(f"expected at most {MAX_XML_BYTES} bytes in {file}, got {file.stat().st_size}.")
        text = file.read_bytes().decode("utf-8-sig")
        if "<!DOCTYPE" in text or "<!ENTITY" in text:
            raise DataError(f"expected plain XML in {file}, got a document type declaration. Remove it.")
        return ElementTree.fromstring(text)
    except (UnicodeDecodeError, ElementTree.ParseError) as error:
        raise DataError(f"cannot read {file}: {error}.") from error


def yolo_pairs(images: Path) -> list[tuple[Path, Path]]:
    """Images of a folder, or listed in a text file, and their label files: the last `images` of a path is `labels`."""
    if images.is_file():
        lines = [line.strip() for line in images.read_text(encoding="utf-8").splitlines() if line.strip()]
        paths = [images.parent / line for line in lines]
    else:
        paths = [images / path for path in sorted(walk_files(images, IMAGE_SUFFIXES))]
    pairs = []
    for path in paths:
        parts = list(path.parts[:-1])
        if "images" in parts:
            parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
        pairs.append((path, Path(*parts) / f"{path.stem}.txt"))
    return pairs


def voc_pairs(images: Path, annotations: Path, stems: Sequence[str] | None = None) -> list[tuple[Path, Path]]:
    """Images and their .xml files; `stems`: those of a split, else all."""
    files = {
        Path(path).with_suffix("").as_posix(): images / path for path in sorted(walk_files(images, IMAGE_SUFFIXES))
    }
    chosen = list(files) if stems is None else stems
    if missing := [stem for stem in chosen if stem not in files]:
        raise DataError(f"{len(missing)} of {len(chosen)} images are missing in {images}, such as {missing[0]}.jpg.")
    return [(files[stem], annotations / f"{stem}.xml") for stem in chosen]
