"""A source: labelled pictures that can be counted, named and read one by one, wherever they lie."""

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

_logger = logging.getLogger(__name__)


class DataError(ValueError):
    """Data that cannot be trained on; the message says what was found and what to do."""


class Source(Protocol):
    """What every kind of data set offers."""

    classes: list[str]
    labels: np.ndarray  # (N,) int64

    def __len__(self) -> int: ...

    def read(self, index: int) -> Any:
        """The picture as RGB, or the video; raises `BadImage` for a damaged one."""
        ...

    def name(self, index: int) -> str:
        """Where the picture lies, for people: a path, or file and row."""
        ...


class Subset:
    """Some pictures of a source."""

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
    """Split off `fraction` of every class for validation; the same seed gives the same split."""
    if not 0 < fraction < 1:
        raise DataError(f"the held-out fraction must lie between 0 and 1, got {fraction}.")
    order = np.random.default_rng(seed).permutation(len(source))
    held: list[int] = []
    for label in range(len(source.classes)):
        members = order[source.labels[order] == label]
        if len(members) == 1:
            raise DataError(
                f"class {source.classes[label]!r} has one picture, so none can be held out. "
                "Add pictures, or give a validation set of its own."
            )
        held.extend(members[: max(1, round(fraction * len(members)))])
    chosen = np.zeros(len(source), dtype=bool)
    chosen[held] = True
    return Subset(source, np.flatnonzero(~chosen)), Subset(source, np.flatnonzero(chosen))


def check_labels(source: Source, role: str = "training") -> None:
    """Find, before the first step, what would otherwise fail or mislead in the middle of the night."""
    classes = source.classes
    if not len(source):
        raise DataError(f"the {role} set is empty.")
    wrong = np.flatnonzero((source.labels < 0) | (source.labels >= len(classes)))
    if len(wrong):
        label = int(source.labels[wrong[0]])
        hint = " Label -1 marks pictures without a label: choose a labelled split." if label == -1 else ""
        raise DataError(
            f"{len(wrong)} labels of the {role} set are out of range: {source.name(int(wrong[0]))} has {label}, "
            f"expected 0 to {len(classes) - 1}.{hint}"
        )
    if role != "training":
        return
    counts = np.bincount(source.labels, minlength=len(classes))
    if (counts > 0).sum() < 2:
        raise DataError(
            f"the {role} set has one class only ({classes[int(counts.argmax())]!r}): there is nothing to tell apart. "
            "Expected a sub-folder or a label for each of at least two classes."
        )
    if empty := [name for name, count in zip(classes, counts, strict=True) if not count]:
        names = ", ".join(repr(name) for name in empty[:5]) + (", …" if len(empty) > 5 else "")
        _logger.warning("%d of %d classes have no pictures to train on: %s", len(empty), len(classes), names)
