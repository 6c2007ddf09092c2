"""Splits, label checks and class names, for every source."""

import json

import numpy as np
import pytest

from saccade.data.sources.base import DataError, Subset, check_labels, hold_out, read_class_names, split_indices
from saccade.data.sources.folder import FolderSource
from tests.data.image_files import grey, write_folder


class Labels:
    """A source of labels only."""

    def __init__(self, labels: list[int], classes: list[str]):
        self.labels, self.classes = np.array(labels, dtype=np.int64), classes

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return f"sample {index}"


def test_subset_reads_labels_and_names_at_its_indices(tmp_path):
    source = FolderSource(write_folder(tmp_path, {"a": 2, "b": 2}))
    subset = Subset(source, [3, 0])
    assert len(subset) == 2
    assert subset.labels.tolist() == [1, 0]
    assert [grey(subset, i) for i in (0, 1)] == [11, 0]
    assert [subset.name(i) for i in (0, 1)] == [source.name(3), source.name(0)]


def test_hold_out_takes_the_fraction_of_each_class(tmp_path):
    source = Labels([0] * 10 + [1] * 20 + [2] * 2, ["a", "b", "c"])
    train, val = hold_out(source, 0.2, seed=3)
    assert np.bincount(val.labels).tolist() == [2, 4, 1]
    assert sorted([*train.indices, *val.indices]) == list(range(32))
    assert hold_out(source, 0.2, seed=3)[1].indices.tolist() == val.indices.tolist()
    assert hold_out(source, 0.2, seed=4)[1].indices.tolist() != val.indices.tolist()


def test_hold_out_needs_two_samples_per_class_and_a_fraction():
    source = Labels([0, 1, 1], ["a", "b"])
    with pytest.raises(DataError, match="class 'a' has only one image"):
        hold_out(source, 0.5)
    with pytest.raises(DataError, match=r"between 0 and 1, got 1.5"):
        hold_out(source, 1.5)


def test_split_indices_partitions_the_range():
    train, val = split_indices(20, 0.3, seed=1)
    assert len(val) == 6
    assert sorted([*train, *val]) == list(range(20))
    assert train.tolist() == sorted(train)
    assert val.tolist() == sorted(val)
    assert split_indices(20, 0.3, seed=1)[1].tolist() == val.tolist()
    for count, fraction in ((1, 0.5), (20, 0.0), (20, 1.0)):
        with pytest.raises(DataError, match="cannot hold out"):
            split_indices(count, fraction)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([], "the training set is empty"),
        ([0, 1, 7], "1 labels of the training set are out of range: sample 2 has 7, expected 0 to 1"),
        ([0, 1, 2], "sample 2 has 2, expected 0 to 1"),
        ([0, -1, -1], "2 labels .*sample 1 has -1.*choose a labelled split"),
        ([1, 1], r"only one class \('b'\)"),
    ],
)
def test_check_labels_rejects_unusable_labels(labels, message):
    with pytest.raises(DataError, match=message):
        check_labels(Labels(labels, ["a", "b"]))


def test_check_labels_allows_a_single_class_for_validation():
    check_labels(Labels([1, 1], ["a", "b"]), "validation")


def test_check_labels_warns_about_classes_without_images(caplog):
    check_labels(Labels([0, 2], ["a", "b", "c"]))
    assert "1 of 3 classes have no training images: 'b'" in caplog.text


def test_class_names_are_read_from_text_or_json(tmp_path):
    assert read_class_names(tmp_path) is None
    (tmp_path / "id2label.json").write_text(json.dumps({"1": "bee", "0": "ant"}))
    assert read_class_names(tmp_path) == ["ant", "bee"]
    (tmp_path / "classnames.txt").write_text("ant\n\nbee \n")
    assert read_class_names(tmp_path) == ["ant", "bee"]
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    assert read_class_names(tmp_path) == ["cat", "dog"]


def test_class_names_with_gaps_raise(tmp_path):
    (tmp_path / "id2label.json").write_text(json.dumps({"0": "ant", "2": "bee"}))
    with pytest.raises(DataError, match=r"from 0 without gaps .*got \[0, 2\]"):
        read_class_names(tmp_path)
