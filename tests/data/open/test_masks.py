"""Segmentation datasets are recognised by their path."""

import json

import numpy as np
import pytest

from saccade.data.open import find_mask_splits, open_split, open_train_and_val
from saccade.data.sources.base import DataError
from tests.data.mask_files import save, save_pair
from tests.data.sources.test_mask_table import CLASSES, write


def test_layout_splits_open_with_its_label_convention(tmp_path):
    save_pair(tmp_path, "images/training/a.jpg", "annotations/training/a.png", np.full((6, 8), 150))
    save_pair(tmp_path, "images/validation/c.jpg", "annotations/validation/c.png", np.full((6, 8), 3))
    train, val = open_train_and_val(tmp_path, find=find_mask_splits)
    assert (train.classes[0], len(train.classes)) == ("wall", 150)
    assert (train.read_mask(0) == 149).all()
    assert (val.read_mask(0) == 2).all()
    assert val.name(0) == str(tmp_path / "images/validation/c.jpg")


def test_other_classes_replace_the_label_convention_of_a_layout(tmp_path):
    save_pair(tmp_path, "images/training/a.jpg", "annotations/training/a.png", np.eye(6, 8))
    (tmp_path / "classes.txt").write_text("off\non\n")
    source = open_split(tmp_path, find=find_mask_splits)
    assert source.classes == ["off", "on"]
    np.testing.assert_array_equal(source.read_mask(0), np.eye(6, 8))
    reduced = open_split(tmp_path, reduce_zero_label=True, find=find_mask_splits)
    np.testing.assert_array_equal(reduced.read_mask(0), np.where(np.eye(6, 8), 0, 255))


def test_unnamed_classes_are_counted_and_pairs_held_out(tmp_path):
    for i in range(4):
        save_pair(tmp_path, f"images/{i}.jpg", f"masks/{i}.png", np.full((6, 8), i % 3))
    train, val = open_train_and_val(tmp_path, val_fraction=0.25, find=find_mask_splits)
    assert train.classes == ["0", "1", "2"]
    assert (len(train), len(val)) == (3, 1)
    names = {train.name(i) for i in range(3)} | {val.name(0)}
    assert names == {str(tmp_path / f"images/{i}.jpg") for i in range(4)}


def test_class_names_come_from_id2label(tmp_path):
    save_pair(tmp_path, "images/a.png", "masks/a.png", np.eye(6, 8))
    (tmp_path / "id2label.json").write_text(json.dumps({"0": "ground", "1": "line"}))
    assert open_split(tmp_path, find=find_mask_splits).classes == ["ground", "line"]


def test_parquet_splits_open(tmp_path):
    write(tmp_path / "train.parquet", [0, 1, 255], class_names=CLASSES)
    write(tmp_path / "val.parquet", [0], class_names=CLASSES)
    train, val = open_train_and_val(tmp_path, find=find_mask_splits)
    assert train.classes == ["sky", "road"]
    assert (len(train), len(val)) == (3, 1)


def test_sets_are_checked_and_share_their_classes(tmp_path):
    write(tmp_path / "train.parquet", [0, 1], class_names=CLASSES)
    write(tmp_path / "val.parquet", [0], class_names='["sky", "road", "car"]')
    with pytest.raises(DataError, match="1 of 3 classes are unknown: car"):
        open_train_and_val(tmp_path, find=find_mask_splits)
    write(tmp_path / "train.parquet", [7], class_names=CLASSES)
    with pytest.raises(DataError, match=r"1 of 1 checked training pairs are invalid: .*mask value 7"):
        open_train_and_val(tmp_path, find=find_mask_splits)


def test_val_path_uses_the_classes_of_the_training_set(tmp_path):
    for name, value in (("one", 2), ("two", 1)):
        save_pair(tmp_path / name, "images/a.png", "masks/a.png", np.full((6, 8), value))
        save(tmp_path / name / "masks/a.png", [[0] * 8] * 5 + [[value] * 8])
    train, val = open_train_and_val(tmp_path / "one", tmp_path / "two", find=find_mask_splits)
    assert train.classes == val.classes == ["0", "1", "2"]


def test_embedded_scenes_open_by_name():
    train, val = open_train_and_val("scenes", scenes=40, size=32, find=find_mask_splits)
    assert (len(train), len(val), train.read_mask(0).shape) == (40, 10, (32, 32))


def test_missing_or_unknown_path_raises(tmp_path):
    with pytest.raises(DataError, match=r"no data at .*: expected a folder with images and masks"):
        find_mask_splits(tmp_path / "absent")
    with pytest.raises(DataError, match="is not a segmentation dataset: expected a folder of images and one of masks"):
        find_mask_splits(tmp_path)
    save_pair(tmp_path, "images/a.png", "masks/a.png")
    with pytest.raises(DataError, match=r"has no split 'val'\. Choose one of all"):
        open_split(tmp_path, "val", find=find_mask_splits)
