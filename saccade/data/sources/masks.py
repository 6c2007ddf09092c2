"""The interface of segmentation datasets, and the conversion of their file values to class indices.

A mask is uint8 (H, W): class 0 to K - 1, and 255 for pixels without a label, whatever convention the files use.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from PIL import Image

from saccade.data.decode.image import BadImage
from saccade.data.sources.base import DataError, split_indices

IGNORE = 255
MAX_CHECKED = 24  # pairs that `check_masks` reads


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
        ignore_index: file value of unlabelled pixels.
    """

    def __init__(
        self,
        num_classes: int,
        mapping: Mapping[int, int] | None = None,
        reduce_zero_label: bool = False,
        ignore_index: int = IGNORE,
    ):
        if num_classes > IGNORE:
            raise DataError(f"expected at most {IGNORE} classes (masks are uint8), got {num_classes}.")
        self.num_classes, self.ignore_index, self.first = num_classes, ignore_index, int(reduce_zero_label)
        self.table = np.full(2**16, -1, np.int16)  # -1: invalid value
        if mapping is not None:
            self.table[:] = IGNORE
            for value, label in mapping.items():
                self.table[value] = label
        else:
            self.table[self.first : self.first + num_classes] = np.arange(num_classes)
            if reduce_zero_label:
                self.table[0] = IGNORE
        self.table[ignore_index] = IGNORE

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
                "data.ignore_index if another value is unlabelled, or data.reduce_zero_label if 0 is unlabelled",
            )
        return labels.astype(np.uint8)


class MaskSubset:
    """Pairs of a source at `indices`."""

    def __init__(self, source: MaskSource, indices: Sequence[int] | np.ndarray):
        self.source, self.indices, self.classes = source, np.asarray(indices, dtype=np.int64), source.classes

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> Image.Image:
        return self.source.read(int(self.indices[index]))

    def read_mask(self, index: int) -> np.ndarray:
        return self.source.read_mask(int(self.indices[index]))

    def name(self, index: int) -> str:
        return self.source.name(int(self.indices[index]))


def hold_out_masks(source: MaskSource, fraction: float, seed: int = 0) -> tuple[MaskSubset, MaskSubset]:
    """Training and validation subsets; `fraction` of the pairs is held out."""
    train, val = split_indices(len(source), fraction, seed)
    return MaskSubset(source, train), MaskSubset(source, val)


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
