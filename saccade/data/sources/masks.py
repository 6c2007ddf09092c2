"""Pictures with a class for every pixel: what a mask file says, and sources that hand out both.

However a set numbers its classes and marks what nobody labelled: here a mask is uint8, 0 to K - 1, and 255 for "not
labelled". Everything that does not fit is an error that names the file.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from saccade.data.decode.image import DECODE_ERRORS, BadImage
from saccade.data.sources.base import DataError
from saccade.data.synthetic.scenes import SHAPES, Scenes

IGNORE = 255
LOOK_AT = 24  # masks of a set that are read before the first update


class MaskSource(Protocol):
    """What every kind of segmentation set offers."""

    classes: list[str]

    def __len__(self) -> int: ...

    def read(self, index: int) -> Image.Image:
        """The picture as RGB; raises `BadImage` for a damaged one."""
        ...

    def read_mask(self, index: int) -> np.ndarray:
        """(H, W) uint8: class numbers, 255 where nothing is labelled; raises `BadImage`."""
        ...

    def name(self, index: int) -> str:
        """Where the picture lies, for people."""
        ...


def masked(source: MaskSource, transform: Callable[..., Any], index: int) -> tuple[Any, Any]:
    """A picture and its mask, as a loader's sample."""
    return transform(*read_pair(source, index))


def read_pair(source: MaskSource, index: int) -> tuple[Image.Image, np.ndarray]:
    """A picture and its mask, of one size."""
    image, mask = source.read(index), source.read_mask(index)
    if (image.height, image.width) != mask.shape:
        raise BadImage(
            source.name(index),
            f"the picture is {image.width} x {image.height}, its mask {mask.shape[1]} x {mask.shape[0]}",
        )
    return image, mask


class Numbering:
    """From the numbers in a set's files to class numbers.

    Args:
        num_classes: K.
        numbers: file value -> class; every other value is not labelled. None: the values are the classes.
        zero_is_unlabelled: 0 marks pixels without a label and class k is written k + 1 (`reduce_zero_label`).
        ignore: file value of pixels without a label.
    """

    def __init__(
        self,
        num_classes: int,
        numbers: Mapping[int, int] | None = None,
        zero_is_unlabelled: bool = False,
        ignore: int = IGNORE,
    ):
        if num_classes > IGNORE:
            raise DataError(f"at most {IGNORE} classes, one byte a pixel; got {num_classes}.")
        self.num_classes, self.ignore, self.zero_is_unlabelled = num_classes, ignore, zero_is_unlabelled
        self.table = np.full(2**16, -1, np.int16)  # -1: no such value
        if numbers is not None:
            self.table[:] = IGNORE
            for value, number in numbers.items():
                self.table[value] = number
        else:
            first = 1 if zero_is_unlabelled else 0
            self.table[first : first + num_classes] = np.arange(num_classes)
            if zero_is_unlabelled:
                self.table[0] = IGNORE
        self.table[ignore] = IGNORE

    def __call__(self, values: np.ndarray, name: str) -> np.ndarray:
        """File values (H, W) -> classes (H, W) uint8."""
        if values.size == 0 or values.min() < 0 or values.max() >= len(self.table):
            raise BadImage(name, f"mask values from {values.min(initial=0)} to {values.max(initial=0)} are no classes")
        found = self.table[values]
        if found.min() < 0:
            wrong = np.unique(values[found < 0])
            some = ", ".join(map(str, wrong[:5])) + (", …" if len(wrong) > 5 else "")
            low = 1 if self.zero_is_unlabelled else 0
            raise BadImage(
                name,
                f"mask value {some} is out of range: expected {low} to {low + self.num_classes - 1}, or {self.ignore} "
                "where nothing is labelled. Are there more classes (data.classes), is another value unlabelled "
                "(data.ignore_index), or does 0 mean unlabelled (data.reduce_zero_label)?",
            )
        return found.astype(np.uint8)


def decode_mask(source: str | Path | bytes | Any, name: str) -> np.ndarray:
    """The numbers in a mask file (H, W): palette, 8-bit or 16-bit grey; the palette's colours do not matter."""
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            image.load()
            values = np.asarray(image)
    except DECODE_ERRORS as error:
        raise BadImage(name, error) from error
    if values.ndim == 3 and values.shape[2] >= 3 and (values[..., :3] == values[..., :1]).all():
        values = values[..., 0]  # grey, saved as colour
    if values.ndim != 2 or values.dtype.kind not in "uib":
        raise BadImage(
            name,
            f"a mask holds class numbers, one channel; this is a colour picture (mode {image.mode}). "
            "Convert it: each colour to its class number, saved as 8-bit PNG",
        )
    return values.astype(np.int64)


class SceneMasks(Scenes):
    """The embedded scenes with their masks: the backdrop and ten shapes."""

    classes = ["backdrop", *SHAPES]  # noqa: RUF012

    def read_mask(self, index: int) -> np.ndarray:
        return self.frame(index).mask


class MaskSubset:
    """Some pictures of a source."""

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


def hold_out(source: MaskSource, fraction: float, seed: int = 0) -> tuple[MaskSubset, MaskSubset]:
    """Split off `fraction` for validation; the same seed gives the same split."""
    if not 0 < fraction < 1 or len(source) < 2:
        raise DataError(f"cannot hold out {fraction} of {len(source)} pictures: give a validation set of its own.")
    order = np.random.default_rng(seed).permutation(len(source))
    held = max(1, round(fraction * len(source)))
    return MaskSubset(source, np.sort(order[held:])), MaskSubset(source, np.sort(order[:held]))


def check_masks(source: MaskSource, role: str = "training") -> None:
    """Look at some pairs now: a wrong numbering would otherwise show after an hour of training, or never."""
    if not len(source):
        raise DataError(f"the {role} set is empty.")
    if len(source.classes) < 2:
        raise DataError(f"the {role} set has one class only ({source.classes[0]!r}): there is nothing to tell apart.")
    problems, labelled = [], False
    chosen = np.unique(np.linspace(0, len(source) - 1, num=min(LOOK_AT, len(source)), dtype=int))
    for index in chosen.tolist():
        try:
            labelled |= bool((read_pair(source, index)[1] != IGNORE).any())
        except BadImage as error:
            problems.append(str(error))
    if len(problems) > len(chosen) // 4:
        raise DataError(f"{len(problems)} of {len(chosen)} {role} pairs looked at cannot be used: {problems[0]}")
    if not labelled:
        raise DataError(f"no pixel is labelled in the {len(chosen)} {role} masks looked at: is the numbering right?")
