"""The interface of every image dataset, subsets and train/validation splits."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from saccade._errors import UsageError

_logger = logging.getLogger(__name__)


MAX_CLASSES = 1_000_000  # without names; a damaged label would otherwise fill the memory


class DataError(ValueError):
    """A dataset that cannot be used. The message says what was expected and what was found."""


class DataOptionError(DataError, UsageError):
    """An option of the data is unknown, or its value is impossible."""


class Source(Protocol):
    """Labelled images or videos, read by index."""

    classes: list[str]
    labels: np.ndarray  # (N,) int64; multi-label: (N, K) bool, any number of classes per sample

    def __len__(self) -> int: ...

    def read(self, index: int) -> Any:
        """The RGB image or the video; raises `BadImage` if it cannot be decoded."""
        ...

    def name(self, index: int) -> str:
        """Location for messages: a path, or file and row."""
        ...


class Subset:
    """Samples of a source at `indices`, for sources of every task; it has those of these attributes the source has."""

    classes: list[str]
    labels: np.ndarray
    image_ids: np.ndarray
    category_ids: list[int]
    has_masks: bool

    def __init__(self, source: Any, indices: Sequence[int] | np.ndarray):
        self.source, self.indices = source, np.asarray(indices, dtype=np.int64)
        for name in ("classes", "category_ids", "has_masks"):
            if hasattr(source, name):
                setattr(self, name, getattr(source, name))
        for name in ("labels", "image_ids"):  # one value per sample
            if hasattr(source, name):
                setattr(self, name, getattr(source, name)[self.indices])

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> Any:
        return self.source.read(int(self.indices[index]))

    def read_mask(self, index: int) -> np.ndarray:
        return self.source.read_mask(int(self.indices[index]))

    def objects(self, index: int, size: tuple[int, int]) -> Any:
        return self.source.objects(int(self.indices[index]), size)

    def name(self, index: int) -> str:
        return self.source.name(int(self.indices[index]))

    def ground_truth(self) -> dict[str, Any]:
        document, ids = self.source.ground_truth(), set(self.image_ids.tolist())
        return document | {
            "images": [entry for entry in document["images"] if entry["id"] in ids],
            "annotations": [annotation for annotation in document["annotations"] if annotation["image_id"] in ids],
        }


def hold_out(source: Any, fraction: float, seed: int = 0) -> tuple[Subset, Subset]:
    """Training and validation subsets. `fraction` is held out: of each class if every sample has one label."""
    if not 0 < fraction < 1:
        raise DataError(f"expected val_fraction between 0 and 1, got {fraction}.")
    order = np.random.default_rng(seed).permutation(len(source))
    is_val = np.zeros(len(source), dtype=bool)
    for name, members in _groups(source, order).items():
        if len(members) == 1:
            raise DataError(f"{name} has only one image, so none can be held out. Add images, or set data.val_path.")
        is_val[members[: max(1, round(fraction * len(members)))]] = True
    return Subset(source, np.flatnonzero(~is_val)), Subset(source, np.flatnonzero(is_val))


def limited(source: Any, count: int | None, seed: int = 0) -> Any:
    """At most `count` samples of a source, the same for the same seed; None for all.

    With one label per sample every class has the same number of them, as far as there are enough.
    """
    if count is None or count >= len(source):
        return source
    if count < 1:
        raise DataError(f"expected a limit of at least 1 sample, got {count}.")
    if hasattr(source, "limited"):  # rendered samples
        return source.limited(count)
    order = np.random.default_rng(seed).permutation(len(source))
    groups = _groups(source, order).values()
    position = np.concatenate([np.arange(len(members)) for members in groups])  # of each sample in its class
    chosen = np.concatenate(list(groups))[np.argsort(position, kind="stable")[:count]]
    return Subset(source, np.sort(chosen))


def _groups(source: Any, order: np.ndarray) -> dict[str, np.ndarray]:
    """The indices `order` by class if every sample has one label, else in one group."""
    if not hasattr(source, "labels") or is_multi_label(source):
        return {"the dataset": order}
    groups = {f"class {name!r}": order[source.labels[order] == label] for label, name in enumerate(source.classes)}
    return {name: members for name, members in groups.items() if len(members)}


def check_labels(source: Source, role: str = "training") -> None:
    """Raise `DataError` for an empty set, labels out of range or a single class; warn about classes without images."""
    classes = source.classes
    if not len(source):
        raise DataError(f"the {role} set is empty.")
    if not is_multi_label(source):
        _check_range(source, role)
    elif not source.labels.any():
        raise DataError(f"no image of the {role} set has a label, so there is no average precision. Add some.")
    if role != "training":
        return
    counts = count_labels(source)
    if (counts > 0).sum() < 2:
        raise DataError(
            f"the {role} set has only one class ({classes[int(counts.argmax())]!r}). "
            "Expected sub-folders or labels of at least two classes."
        )
    if empty := [name for name, count in zip(classes, counts, strict=True) if not count]:
        names = ", ".join(repr(name) for name in empty[:5]) + (", ..." if len(empty) > 5 else "")
        _logger.warning("%d of %d classes have no training images: %s", len(empty), len(classes), names)


def is_multi_label(source: Any) -> bool:
    """Whether samples have any number of labels."""
    return hasattr(source, "labels") and source.labels.ndim == 2


def count_labels(source: Source) -> np.ndarray:
    """Number of samples per class (K,)."""
    if is_multi_label(source):
        return source.labels.sum(0)
    return np.bincount(source.labels, minlength=len(source.classes))


def with_label_kind(source: Any, multi_label: bool | None) -> Any:
    """The source with multi-hot labels (true), with one label per sample (false), or as it is (None)."""
    if multi_label is None or multi_label == is_multi_label(source):
        return source
    if multi_label:
        _check_range(source, "labelled")
        source.labels = source.labels[:, None] == np.arange(len(source.classes))
        return source
    counts = source.labels.sum(1)
    if len(other := np.flatnonzero(counts != 1)):
        raise DataError(
            f"expected one label per image, got {counts[other[0]]} for {source.name(int(other[0]))} ({len(other)} such "
            "images). Use a multi-label model, or leave out data.multi_label=false."
        )
    source.labels = source.labels.argmax(1).astype(np.int64)
    return source


def _check_range(source: Source, role: str) -> None:
    classes = source.classes
    invalid = np.flatnonzero((source.labels < 0) | (source.labels >= len(classes)))
    if len(invalid):
        label = int(source.labels[invalid[0]])
        hint = " Label -1 marks images without a label: choose a labelled split." if label == -1 else ""
        raise DataError(
            f"{len(invalid)} labels of the {role} set are out of range: {source.name(int(invalid[0]))} has {label}, "
            f"expected 0 to {len(classes) - 1}.{hint}"
        )


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


def numbered_classes(labels: np.ndarray, where: str) -> list[str]:
    """Names "0", "1", … up to the largest label (N,)."""
    largest = int(labels.max(initial=-1))
    if largest >= MAX_CLASSES:
        raise DataError(f"expected labels below {MAX_CLASSES} in {where}, got {largest}. Name the classes.")
    return [str(i) for i in range(largest + 1)]


def index_labels(labels: list[str], classes: list[str] | None, where: str) -> tuple[list[str], np.ndarray]:
    """Class names and indices (N,) of string labels, in the order of `classes` or else sorted."""
    names = list(classes) if classes is not None else sorted(set(labels))
    check_known_classes(set(labels), names, where)
    index = {name: i for i, name in enumerate(names)}
    return names, np.asarray([index[label] for label in labels], dtype=np.int64)


def index_label_lists(
    lists: Sequence[Sequence[str | int]], classes: list[str] | None, where: str
) -> tuple[list[str], np.ndarray]:
    """Class names and multi-hot labels (N, K) of lists of names or of indices."""
    flat = [label for labels in lists for label in labels]
    if not flat and not classes:
        raise DataError(f"expected labels in {where}, got only empty lists.")
    if all(isinstance(label, int) and not isinstance(label, bool) for label in flat):
        indices = np.asarray(flat, dtype=np.int64)
        names = classes or numbered_classes(indices, where)
        if len(invalid := indices[(indices < 0) | (indices >= len(names))]):
            raise DataError(f"expected labels from 0 to {len(names) - 1} in {where}, got {invalid[0]}.")
    elif all(isinstance(label, str) for label in flat):
        names, indices = index_labels([str(label) for label in flat], classes, where)
    else:
        raise DataError(f"expected lists of class names or of indices as labels in {where}, got both or neither.")
    labels = np.zeros((len(lists), len(names)), dtype=bool)
    labels[np.repeat(np.arange(len(lists)), [len(labels) for labels in lists]), indices] = True
    return list(names), labels


def check_known_classes(names: set[str], classes: list[str], where: str) -> None:
    """Raise `DataError` for classes that the training set does not have."""
    if unknown := sorted(names - set(classes)):
        raise DataError(f"{where} has classes that are not in the training set: {', '.join(unknown[:5])}.")
