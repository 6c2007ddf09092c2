"""The interface of segmentation datasets, and the conversion of their file values to class indices.

A mask is uint8 (H, W): class 0 to K - 1, and 255 for pixels without a label, whatever convention the files use.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from PIL import Image

from saccade.data.decode.image import BadImage, read_mask_values
from saccade.data.sources.base import DataError

IGNORE = 255
BINARY = ("background", "foreground")  # names of the values 0 and 255
MAX_CHECKED = 24  # pairs that `check_masks` reads
MAX_COUNTED = 2000  # masks that are read to find the number of classes

_logger = logging.getLogger(__name__)


class MaskSource(Protocol):
    """Images with masks, read by index."""

    classes: list[str]

    def __len__(self) -> int: ...

    def read(self, index: int) -> Image.Image:
        """The RGB image; raises `BadImage` if it cannot be decoded."""
        ...

    def read_mask(self, index: int) -> np.ndarray:
        """(H, W) uint8: class indices, 255 for unlabelled pixels; raises `BadImage`."""
        ...

    def name(self, index: int) -> str:
        """Location of the image, for messages."""
        ...


def read_pair(source: MaskSource, index: int) -> tuple[Image.Image, np.ndarray]:
    """An image and its mask; raises `BadImage` if their sizes differ."""
    image, mask = source.read(index), source.read_mask(index)
    if (image.height, image.width) != mask.shape:
        raise BadImage(
            source.name(index),
            f"the image is {image.width} x {image.height} px, its mask {mask.shape[1]} x {mask.shape[0]} px",
        )
    return image, mask


def load_pair(source: MaskSource, transform: Callable[..., Any], index: int) -> tuple[Any, Any]:
    """Transformed image and mask, as a sample for a loader."""
    return transform(*read_pair(source, index))


class LabelMap:
    """File values -> class indices.

    Args:
        num_classes: K.
        mapping: file value -> class; other values are unlabelled. None: the values are the class indices.
        reduce_zero_label: 0 is unlabelled and class k is stored as k + 1.
        ignore_index: file value of unlabelled pixels; None: 255, unless `mapping` uses it for a class.
        colours: the values are colours, 0xrrggbb.
    """

    def __init__(
        self,
        num_classes: int,
        mapping: Mapping[int, int] | None = None,
        reduce_zero_label: bool = False,
        ignore_index: int | None = None,
        colours: bool = False,
    ):
        if num_classes > IGNORE:
            raise DataError(f"expected at most {IGNORE} classes (masks are uint8), got {num_classes}.")
        self.num_classes, self.first, self.colours = num_classes, int(reduce_zero_label), colours
        self.ignore_index = IGNORE if ignore_index is None else ignore_index
        self.table = np.full(2**24 if colours else 2**16, -1, np.int16)  # -1: invalid value
        if mapping is not None:
            self.table[:] = IGNORE
            for value, label in mapping.items():
                self.table[value] = label
        else:
            self.table[self.first : self.first + num_classes] = np.arange(num_classes)
            if reduce_zero_label:
                self.table[0] = IGNORE
        if mapping is None or ignore_index is not None:
            self.table[self.ignore_index] = IGNORE

    def read(self, source: Any, name: str) -> np.ndarray:
        """Path or bytes of a mask -> class indices (H, W) uint8."""
        return self(read_mask_values(source, name, self.colours), name)

    def __call__(self, values: np.ndarray, name: str) -> np.ndarray:
        """File values (H, W) -> class indices (H, W) uint8."""
        if values.size == 0 or values.min() < 0 or values.max() >= len(self.table):
            low, high = values.min(initial=0), values.max(initial=0)
            raise BadImage(name, f"expected mask values of 0 to {len(self.table) - 1}, got {low} to {high}")
        labels = self.table[values]
        if labels.min() < 0:
            invalid = np.unique(values[labels < 0])
            listed = ", ".join(map(str, invalid[:5])) + (", ..." if len(invalid) > 5 else "")
            raise BadImage(
                name,
                f"mask value {listed} is out of range: expected {self.first} to {self.first + self.num_classes - 1}, "
                f"or {self.ignore_index} for unlabelled pixels. Set data.classes if there are more classes, "
                "data.ignore_index if another value is unlabelled, data.reduce_zero_label if 0 is unlabelled, or "
                "data.mask_values to list the value of every class",
            )
        return labels.astype(np.uint8)


def choose_labels(
    count: int,
    encoded: Callable[[int], tuple[Any, str]],
    location: str,
    classes: list[str] | None = None,
    mask_values: Sequence[int | str] | None = None,
    ignore_index: int | None = None,
    reduce_zero_label: bool = False,
) -> tuple[list[str], LabelMap]:
    """Class names and label map of `count` masks; `encoded` returns path or bytes, and name, of a mask.

    `mask_values` lists the file value or the colour ("#rrggbb") of every class. Without it the values are class
    indices, counted if there are no `classes`; masks of 0 and 255 only are read as two classes.
    """
    may_be_binary = mask_values is None and ignore_index is None and (not classes or len(classes) == 2)
    if may_be_binary and _values_in(count, encoded, location, complete=not classes) == {0, IGNORE}:
        mask_values = (0, IGNORE)
        advice = "Set data.ignore_index=255 if 255 is unlabelled."
        _logger.warning("the masks in %s have the values 0 and 255 only: read as two classes. %s", location, advice)
    if mask_values is not None:
        names = classes or (list(BINARY) if tuple(mask_values) == (0, IGNORE) else [str(v) for v in mask_values])
        values = [_parse_value(value) for value in mask_values]
        if len(set(values)) != len(names):
            raise DataError(f"expected one of data.mask_values per class ({len(names)}), got {len(set(values))}.")
        colours = any(isinstance(value, str) and value.startswith("#") for value in mask_values)
        mapping = {value: label for label, value in enumerate(values)}
        return names, LabelMap(len(names), mapping, False, ignore_index, colours)
    if not classes:
        values = _values_in(count, encoded, location) - {IGNORE if ignore_index is None else ignore_index}
        classes = [str(label) for label in range(max(values, default=-1) + (0 if reduce_zero_label else 1))]
    return classes, LabelMap(len(classes), None, reduce_zero_label, ignore_index)


def _parse_value(value: int | str) -> int:
    try:
        return int(value[1:], 16) if isinstance(value, str) and value.startswith("#") else int(value)
    except ValueError as error:
        raise DataError(f"expected numbers or colours such as '#ff0000' in data.mask_values, got {value!r}.") from error


def _values_in(count: int, encoded: Callable[[int], tuple[Any, str]], location: str, complete: bool = True) -> set[int]:
    """File values in the masks that can be read: in all, or in some if not `complete`."""
    if complete and count > MAX_COUNTED:
        raise DataError(f"expected class names for {location}, got none. Write them to classes.txt, one per line.")
    indices = np.unique(np.linspace(0, count - 1, num=min(count, MAX_COUNTED if complete else MAX_CHECKED)).astype(int))
    values: set[int] = set()
    problems: list[str] = []
    for index in indices.tolist():
        try:
            values.update(np.unique(read_mask_values(*encoded(index))).tolist())
        except BadImage as error:  # reported when the pair is read, unless all are bad
            problems.append(str(error))
    if complete and problems and not values:
        raise DataError(f"none of the {len(problems)} masks in {location} can be read: {problems[0]}.")
    return values


def check_masks(source: MaskSource, role: str = "training") -> None:
    """Read some pairs and raise `DataError` if a quarter of them is invalid, or if no pixel is labelled."""
    if not len(source):
        raise DataError(f"the {role} set is empty.")
    if len(source.classes) < 2:
        raise DataError(f"expected at least two classes in the {role} set, got {source.classes[0]!r} only.")
    problems, is_labelled = [], False
    indices = np.unique(np.linspace(0, len(source) - 1, num=min(MAX_CHECKED, len(source)), dtype=int))
    for index in indices.tolist():
        try:
            is_labelled |= bool((read_pair(source, index)[1] != IGNORE).any())
        except BadImage as error:
            problems.append(str(error))
    if len(problems) > len(indices) // 4:
        raise DataError(f"{len(problems)} of {len(indices)} checked {role} pairs are invalid: {problems[0]}")
    if not is_labelled:
        raise DataError(f"no pixel is labelled in {len(indices)} checked {role} masks. Check data.ignore_index.")
