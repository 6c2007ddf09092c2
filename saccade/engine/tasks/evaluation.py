"""Shared by the evaluations of all tasks: the batch loop, class check."""

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from saccade.data.sources.base import DataError
from saccade.engine.loaders import AnyBatch, UnreadableImages
from saccade.models.card import Card

BatchT = TypeVar("BatchT", bound=AnyBatch)


class EvaluationBatches(Generic[BatchT]):
    """Iterate over the non-empty batches of a loader; afterwards `num_unreadable` images have been skipped.

    Raises ValueError if no image could be read, and DataError at the limit of `unreadable`.
    """

    def __init__(self, batches: Iterable[BatchT], unreadable: UnreadableImages | None = None):
        self.batches, self.unreadable, self.num_unreadable = batches, unreadable, 0

    def __iter__(self) -> Iterator[BatchT]:
        empty = True
        for batch in self.batches:
            self.num_unreadable += len(batch.bad)
            if self.unreadable is not None:
                self.unreadable.add(batch.bad, "evaluation")
            if len(batch.labels):
                empty = False
                yield batch
        if empty:
            raise ValueError("no image could be evaluated.")


def check_num_classes(card: Card, classes: list[str]) -> None:
    """Raise if model and data differ in their number of classes."""
    if len(classes) != card.num_classes:
        raise DataError(f"the model has {card.num_classes} classes, the data has {len(classes)}.")
