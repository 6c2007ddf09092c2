"""The interface of every image dataset, subsets and train/validation splits."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

_logger = logging.getLogger(__name__)


class DataError(ValueError):
    """A dataset that cannot be used. The message says what was expected and what was found."""


class Source(Protocol):
    """Labelled images or videos, read by index."""

    classes: list[str]
    labels: np.ndarray  # (N,) int64

    def __len__(self) -> int: ...

    def read(self, index: int) -> Any:
        """The RGB image or the video; raises `BadImage` if it cannot be decoded."""
        ...

    def name(self, index: int) -> str:
        """Location for messages: a path, or file and row."""
        ...


class Subset:
    """Samples of a source at `indices`."""

    def __init__(self, source: Source, indices: Sequence[int] | np.ndarray):
        self.source, self.indices = source, np.asarray(indices, dtype=np.int64)
        self.classes, self.labels = source.classes, source.labels[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> Any:
        return self.source.read(int(self.indices[index]))

    def name(self, index: int) -> str:
        return self.source.name(int(self.indices[index]))


def hold_out(source: Source, fraction: float, seed: int = 0) -> tuple[Subset, Subset]:
    """Training and validation subsets, stratified: `fraction` of each class is held out."""
    if not 0 < fraction < 1:
        raise DataError(f"expected val_fraction between 0 and 1, got {fraction}.")
    order = np.random.default_rng(seed).permutation(len(source))
    is_val = np.zeros(len(source), dtype=bool)
    for label in range(len(source.classes)):
        members = order[source.labels[order] == label]
        if len(members) == 1:
            raise DataError(
                f"class {source.classes[label]!r} has only one image, so none can be held out. "
                "Add images, or set data.val_path."
            )
        is_val[members[: max(1, round(fraction * len(members)))]] = True
    return Subset(source, np.flatnonzero(~is_val)), Subset(source, np.flatnonzero(is_val))


def split_indices(count: int, fraction: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sorted indices for training and validation, not stratified."""
    if not 0 < fraction < 1 or count < 2:
        raise DataError(f"cannot hold out a fraction of {fraction} of {count} images. Set data.val_path.")
    order = np.random.default_rng(seed).permutation(count)
    num_val = max(1, round(fraction * count))
    return np.sort(order[num_val:]), np.sort(order[:num_val])


def check_labels(source: Source, role: str = "training") -> None:
    """Raise `DataError` for an empty set, labels out of range or a single class; warn about classes without images."""
    classes = source.classes
    if not len(source):
        raise DataError(f"the {role} set is empty.")
    invalid = np.flatnonzero((source.labels < 0) | (source.labels >= len(classes)))
    if len(invalid):
        label = int(source.labels[invalid[0]])
        hint = " Label -1 marks images without a label: choose a labelled split." if label == -1 else ""
        raise DataError(
            f"{len(invalid)} labels of the {role} set are out of range: {source.name(int(invalid[0]))} has {label}, "
            f"expected 0 to {len(classes) - 1}.{hint}"
        )
    if role != "training":
        return
    counts = np.bincount(source.labels, minlength=len(classes))
    if (counts > 0).sum() < 2:
        raise DataError(
            f"the {role} set has only one class ({classes[int(counts.argmax())]!r}). "
            "Expected sub-folders or labels of at least two classes."
        )
    if empty := [name for name, count in zip(classes, counts, strict=True) if not count]:
        names = ", ".join(repr(name) for name in empty[:5]) + (", ..." if len(empty) > 5 else "")
        _logger.warning("%d of %d classes have no training images: %s", len(empty), len(classes), names)


def read_class_names(folder: Path) -> list[str] | None:
    """Names from classes.txt or classnames.txt (one per line) or id2label.json (index -> name), if there is one."""
    for file in (folder / "classes.txt", folder / "classnames.txt"):
        if file.is_file():
            return [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    file = folder / "id2label.json"
    if not file.is_file():
        return None
    names = {int(index): name for index, name in json.loads(file.read_text(encoding="utf-8")).items()}
    if sorted(names) != list(range(len(names))):
        raise DataError(f"expected class indices from 0 without gaps in {file}, got {sorted(names)[:5]}, ....")
    return [names[index] for index in range(len(names))]


def index_labels(labels: list[str], classes: list[str] | None, where: str) -> tuple[list[str], np.ndarray]:
    """Class names and indices (N,) of string labels, in the order of `classes` or else sorted."""
    names = list(classes) if classes is not None else sorted(set(labels))
    check_known_classes(set(labels), names, where)
    index = {name: i for i, name in enumerate(names)}
    return names, np.asarray([index[label] for label in labels], dtype=np.int64)


def check_known_classes(names: set[str], classes: list[str], where: str) -> None:
    """Raise `DataError` for classes that the training set does not have."""
    if unknown := sorted(names - set(classes)):
        raise DataError(f"{where} has classes that are not in the training set: {', '.join(unknown[:5])}.")
