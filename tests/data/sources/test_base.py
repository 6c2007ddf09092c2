"""Splits, label checks and class names, for every source."""

import json

import numpy as np
import pytest

from saccade.data.open import match_classes
from saccade.data.sources.base import (
    DataError,
    Subset,
    check_labels,
    count_labels,
    hold_out,
    limited,
    read_class_names,
    with_label_kind,
)
from saccade.data.sources.folder import FolderSource
from saccade.data.synthetic.motions import MotionSet
from saccade.data.synthetic.scenes import SceneMasks
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


def test_hold_out_without_labels_partitions_the_samples():
    source = SceneMasks(20, 16)
    train, val = hold_out(source, 0.3, seed=1)
    assert (len(val), hasattr(val, "labels")) == (6, False)
    assert sorted([*train.indices, *val.indices]) == list(range(20))
    with pytest.raises(DataError, match="the dataset has only one image"):
        hold_out(SceneMasks(1, 16), 0.3)


def test_limited_takes_as_many_samples_of_every_class():
    source = Labels([0] * 10 + [1] * 20 + [2] * 2, ["a", "b", "c"])
    subset = limited(source, 12, seed=3)
    assert np.bincount(subset.labels).tolist() == [5, 5, 2]
    assert subset.indices.tolist() == sorted(subset.indices)
    assert limited(source, 12, seed=3).indices.tolist() == subset.indices.tolist()
    assert limited(source, 12, seed=4).indices.tolist() != subset.indices.tolist()
    assert limited(source, 40) is limited(source, None) is source
    with pytest.raises(DataError, match="at least 1 sample, got 0"):
        limited(source, 0)


def test_limited_renders_fewer_clips():
    clips = limited(MotionSet(32, 16, 2), 9)
    assert isinstance(clips, MotionSet)
    assert (len(clips), clips.labels.tolist()) == (9, [0, 1, 2, 3, 4, 5, 6, 7, 0])


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


def listed(labels):
    """Images with lists of labels of three classes."""
    source = Labels([], ["a", "b", "c"])
    source.labels = np.asarray(labels)
    return source


def test_multi_label_sets_are_split_and_limited_without_classes():
    labels = np.zeros((20, 3), dtype=bool)
    labels[:, 0] = True
    labels[:1, 1] = True  # a class with one image, which a split by class would refuse
    train, val = hold_out(listed(labels), 0.25)
    assert (len(train), len(val), train.labels.shape) == (15, 5, (15, 3))
    assert len(limited(listed(labels), 7)) == 7
    assert count_labels(listed(labels)).tolist() == [20, 1, 0]


def test_label_kind_is_converted_or_refused():
    single = with_label_kind(listed([2, 0]), True)
    assert single.labels.tolist() == [[False, False, True], [True, False, False]]
    assert with_label_kind(single, False).labels.tolist() == [2, 0]
    with pytest.raises(DataError, match="expected one label per image, got 2 for sample 1"):
        with_label_kind(listed([[True, False, False], [True, True, False]]), False)
    with pytest.raises(DataError, match="1 labels of the labelled set are out of range: sample 0 has -1"):
        with_label_kind(listed([-1, 0]), True)


def test_multi_label_set_needs_two_classes():
    with pytest.raises(DataError, match="only one class"):
        check_labels(listed([[True, False, False]] * 3))
    check_labels(listed([[True, False, False]] * 3), "validation")
    with pytest.raises(DataError, match="no image of the validation set has a label"):
        check_labels(listed([[False, False, False]] * 3), "validation")


def test_classes_of_a_multi_label_set_are_matched_by_name():
    source = match_classes(listed([[True, False, True]]), ["c", "x", "b", "a"])
    assert source.labels.tolist() == [[True, False, False, True]]
