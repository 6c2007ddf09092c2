"""The batch loop and the class check of all evaluations."""

import pytest
import torch

from saccade.data.loader import Batch
from saccade.data.sources.base import DataError
from saccade.engine.loaders import UnreadableImages
from saccade.engine.tasks.evaluation import EvaluationBatches, check_num_classes
from saccade.models.card import Card, Preprocess


def batch(labels: list[int], bad: list[tuple[int, str]]) -> Batch:
    return Batch(torch.zeros(len(labels), 3, 1, 1), torch.tensor(labels), torch.arange(len(labels)), bad)


def test_empty_batches_are_skipped_and_unreadable_images_counted():
    unreadable = UnreadableImages(3)
    reader = EvaluationBatches([batch([], [(0, "a")]), batch([1], []), batch([2, 0], [(4, "b")])], unreadable)
    assert [one.labels.tolist() for one in reader] == [[1], [2, 0]]
    assert (reader.num_unreadable, unreadable.reasons) == (2, {"evaluation 0": "a", "evaluation 4": "b"})


def test_limit_of_unreadable_images():
    with pytest.raises(DataError, match="2 images cannot be read"):
        list(EvaluationBatches([batch([1], [(0, "a"), (1, "b")])], UnreadableImages(1)))


def test_no_readable_image():
    with pytest.raises(ValueError, match="no image could be evaluated"):
        list(EvaluationBatches([batch([], [(0, "a")])]))


def test_number_of_classes_must_match():
    card = Card("svit_nano", 10, {}, [], Preprocess())
    check_num_classes(card, [str(i) for i in range(10)])
    with pytest.raises(DataError, match=r"^the model has 10 classes, the data has 200\.$"):
        check_num_classes(card, [str(i) for i in range(200)])
