"""Labelled images and videos are recognised by their path, and unusable ones raise before training."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from saccade.data.decode.video import write_video
from saccade.data.open import find_splits, find_video_splits, open_split, open_train_and_val
from saccade.data.sources.base import DataError
from tests.data.image_files import grey, png, write_folder, write_parquet, write_shard


def test_folder_splits_share_class_indices(tmp_path):
    write_folder(tmp_path / "train", {"a": 2, "b": 2, "c": 2})
    write_folder(tmp_path / "val", {"c": 1, "b": 1}, start=100)
    train, val = open_train_and_val(tmp_path)
    assert (train.classes, val.classes) == (["a", "b", "c"], ["a", "b", "c"])
    assert val.labels.tolist() == [1, 2]
    assert [grey(val, i) for i in (0, 1)] == [110, 100]


def test_without_validation_split_a_fraction_of_each_class_is_held_out(tmp_path):
    write_folder(tmp_path, {"a": 10, "b": 20})
    train, val = open_train_and_val(tmp_path, val_fraction=0.2, seed=3)
    assert np.bincount(val.labels).tolist() == [2, 4]
    names = [train.name(i) for i in range(len(train))] + [val.name(i) for i in range(len(val))]
    assert len(set(names)) == len(names) == 30


def test_val_path_names_another_dataset(tmp_path):
    write_folder(tmp_path / "one", {"a": 2, "b": 2})
    write_folder(tmp_path / "two", {"b": 1}, start=100)
    train, val = open_train_and_val(tmp_path / "one", tmp_path / "two")
    assert (len(train), val.labels.tolist(), grey(val, 0)) == (4, [1], 100)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: (p / "a").mkdir(), "has no images"),
        (lambda p: write_folder(p, {"only": 3}), "only one class"),
        (lambda p: (p / "x.png").write_bytes(png(1)), "1 images directly in it"),
        (lambda p: write_parquet(p / "train.parquet", [0, 1, 7], ["a", "b"]), "has 7, expected 0 to 1"),
        (lambda p: write_parquet(p / "train.parquet", [0, 1], column="pixels"), r"data\.image_column=NAME"),
    ],
)
def test_unusable_data_raises_before_training(tmp_path, build, message):
    build(tmp_path)
    with pytest.raises(DataError, match=message):
        open_train_and_val(tmp_path)


def test_missing_or_unknown_path_raises(tmp_path):
    with pytest.raises(DataError, match=r"no data at .*missing: expected a folder, .* or 'scenes'"):
        find_splits(tmp_path / "missing")
    with pytest.raises(DataError, match="no file matches"):
        find_splits(tmp_path / "*.parquet")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(DataError, match=r"expected \.parquet, \.arrow or \.tar files, got \.txt"):
        find_splits(tmp_path / "notes.txt")
    with pytest.raises(DataError, match=r"has no split 'test'\. Choose one of all"):
        open_split(write_folder(tmp_path / "images", {"a": 1}), "test")


def test_validation_class_that_training_lacks_raises(tmp_path):
    write_folder(tmp_path / "train", {"a": 2, "b": 2})
    write_folder(tmp_path / "val", {"z": 1})
    with pytest.raises(DataError, match="classes that are not in the training set: z"):
        open_train_and_val(tmp_path)


def test_parquet_opens_by_folder_glob_and_file(tmp_path):
    names = ["first", "second"]
    write_parquet(tmp_path / "train-00000-of-00002.parquet", [0, 1, 0], names, [5, 6, 7])
    write_parquet(tmp_path / "train-00001-of-00002.parquet", [1, 1], names, [8, 9])
    write_parquet(tmp_path / "test.parquet", [1], names, [50])
    train, val = open_train_and_val(tmp_path)
    assert train.classes == names
    assert [grey(train, i) for i in range(5)] == [5, 6, 7, 8, 9]
    assert [grey(val, i) for i in range(len(val))] == [50]
    matched = open_split(tmp_path / "train-*.parquet")
    assert [grey(matched, i) for i in range(5)] == [5, 6, 7, 8, 9]
    single = open_split(tmp_path / "test.parquet")
    assert (len(single), grey(single, 0)) == (1, 50)


def test_parquet_in_the_data_folder_of_the_hub_is_found(tmp_path):
    write_parquet(tmp_path / "data/train-0.parquet", [0, 1], ["a", "b"])
    assert list(find_splits(tmp_path)) == ["train"]


def test_saved_hugging_face_datasets_open(tmp_path):
    """The files of Dataset.save_to_disk: Arrow streams and state.json, below dataset_dict.json for several splits."""
    for split, labels in (("train", [0, 1, 1]), ("test", [1])):
        folder = tmp_path / split
        folder.mkdir()
        path = write_parquet(tmp_path / "t.parquet", labels, ["a", "b"], [20 + i for i in range(len(labels))])
        table = pq.read_table(path)
        path.unlink()
        with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as writer:
            writer.write_table(table)
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_indices_data_files": None}
        (folder / "state.json").write_text(json.dumps(state))
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    train, val = open_train_and_val(tmp_path)
    assert (train.classes, train.labels.tolist(), val.labels.tolist()) == (["a", "b"], [0, 1, 1], [1])
    assert grey(train, 2) == 22
    assert open_split(tmp_path / "train").labels.tolist() == [0, 1, 1]


def test_shards_are_grouped_into_splits_by_name(tmp_path):
    write_shard(tmp_path / "train-0.tar", {"0": {"png": png(1), "cls": b"0"}, "1": {"png": png(2), "cls": b"2"}})
    write_shard(tmp_path / "train-1.tar", {"7": {"png": png(3), "cls": b"1"}})
    write_shard(tmp_path / "val-0.tar", {"9": {"png": png(4), "cls": b"1"}})
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\n")
    train, val = open_train_and_val(tmp_path)
    assert train.classes == val.classes == ["ant", "bee", "cat"]
    assert (train.labels.tolist(), val.labels.tolist()) == ([0, 2, 1], [1])


def test_labels_are_matched_to_the_classes_of_a_model_by_name(tmp_path):
    write_folder(tmp_path, {"b": 1, "c": 1})
    assert open_split(tmp_path, classes=["a", "b", "c", "d"]).labels.tolist() == [1, 2]
    path = write_parquet(tmp_path / "x.parquet", [0, 1], ["c", "a"])
    source = open_split(path, classes=["a", "b", "c", "d"])
    assert (source.labels.tolist(), source.classes) == ([2, 0], ["a", "b", "c", "d"])
    with pytest.raises(DataError, match="1 of 2 classes are unknown: zebra"):
        open_split(write_parquet(tmp_path / "y.parquet", [0, 1], ["a", "zebra"]), classes=["a", "b"])


def test_class_names_that_are_indices_match_by_index(tmp_path):
    source = open_split(write_parquet(tmp_path / "x.parquet", [1, 0], ["0", "1"]), classes=["a", "b", "c"])
    assert (source.labels.tolist(), source.classes) == ([1, 0], ["a", "b", "c"])


def test_embedded_scenes_open_by_name():
    train, val = open_train_and_val("scenes", scenes=40, size=32)
    assert (len(train), len(val), train.read(0).size) == (40, 10, (32, 32))
    assert val.name(0) == "scenes (val, seed 0), scene 0"


@pytest.fixture
def videos(tmp_path):
    """train/ and val/ with two classes of three videos each."""
    for split in ("train", "val"):
        for name in ("jump", "run fast"):
            for i in range(3):
                write_video(tmp_path / split / name / f"clip {i}.mp4", np.zeros((2, 16, 16, 3), np.uint8))
    return tmp_path


def test_video_folder_splits_open(videos):
    train, val = open_train_and_val(videos, find=find_video_splits)
    assert (len(train), len(val), train.classes) == (6, 6, ["jump", "run fast"])
    assert open_split(videos, find=find_video_splits).name(0) == str(videos / "val/jump/clip 0.mp4")
    assert len(open_split(videos / "train", find=find_video_splits)) == 6


def test_video_lists_open_with_class_names_from_their_folder(tmp_path):
    (tmp_path / "train.csv").write_text("a.mp4,1\nb.mp4,0\n")
    (tmp_path / "val.csv").write_text("c.mp4,1\n")
    (tmp_path / "classes.txt").write_text("jump\nrun fast\n")
    train, val = open_train_and_val(tmp_path, find=find_video_splits)
    assert (train.classes, train.labels.tolist(), val.labels.tolist()) == (["jump", "run fast"], [1, 0], [1])


def test_unknown_video_path_raises(videos):
    with pytest.raises(DataError, match=r"no data at .*: expected class folders of videos"):
        find_video_splits(videos / "nowhere")
    with pytest.raises(DataError, match=r"expected a list of videos \(\.csv, .*, \.txt\) or a folder, got .*\.mp4"):
        find_video_splits(videos / "train" / "jump" / "clip 0.mp4")


def test_embedded_motions_open_by_name():
    train, val = open_train_and_val("motions", find=find_video_splits, motions=64, size=32, frames=4)
    assert (len(train), len(val)) == (64, 16)
    assert (train.split, val.split) == ("train", "val")
    assert len(train.read(0)) == 4
