"""Detection datasets are recognised by their path."""

import pytest

from saccade.data.open import find_object_splits, open_split, open_train_and_val
from saccade.data.sources.base import DataError
from tests.data.coco_files import write
from tests.data.sources import test_object_table as table_files


@pytest.mark.parametrize(
    ("file", "images", "split"),
    [
        ("annotations/instances_train2017.json", "train2017", "train"),  # COCO
        ("annotations/instances_val.json", "images/val", "val"),
        ("train/_annotations.coco.json", "train", "train"),  # Roboflow
        ("labels.json", "images", "labels"),
    ],
)
def test_common_layouts_are_found(tmp_path, file, images, split):
    path = write(tmp_path, None, file, images)
    assert list(find_object_splits(tmp_path)) == [split]
    for source in (open_split(tmp_path, find=find_object_splits), open_split(path, find=find_object_splits)):
        assert len(source) == 3
        assert source.read(2).getpixel((0, 0)) == (20, 0, 0)


def test_parquet_splits_are_found_by_file_name(tmp_path):
    table_files.write(tmp_path / "train-00000-of-00001.parquet", table_files.rows(3))
    table_files.write(tmp_path / "test-00000-of-00001.parquet", table_files.rows(1))
    train, test = open_train_and_val(tmp_path, find=find_object_splits)
    assert (len(train), len(test)) == (3, 1)


def test_without_validation_split_images_are_held_out(tmp_path):
    write(tmp_path)
    train, val = open_train_and_val(tmp_path, val_fraction=0.34, find=find_object_splits)
    assert sorted([*train.image_ids.tolist(), *val.image_ids.tolist()]) == [10, 20, 30]
    assert len(val) == 1
    assert {entry["id"] for entry in val.ground_truth()["images"]} == set(val.image_ids.tolist())
    again, _ = open_train_and_val(tmp_path, val_fraction=0.34, find=find_object_splits)
    assert again.image_ids.tolist() == train.image_ids.tolist()


def test_embedded_scenes_open_by_name():
    train, val = open_train_and_val("scenes", scenes=80, size=32, find=find_object_splits)
    assert (len(train), len(val), train.read(0).size) == (80, 10, (32, 32))


def test_missing_images_or_annotations_raise(tmp_path):
    path = write(tmp_path / "a", None, images="elsewhere/nested")
    with pytest.raises(DataError, match=r"cannot find the images of .*instances_train.json: a.png is neither in"):
        open_split(path, find=find_object_splits)
    with pytest.raises(DataError, match=r"expected COCO annotations .* or Parquet files in .*elsewhere"):
        open_split(tmp_path / "a" / "elsewhere", find=find_object_splits)
    with pytest.raises(DataError, match="no data at"):
        open_split(tmp_path / "b", find=find_object_splits)
    with pytest.raises(DataError, match=r"expected a COCO .json or a .parquet file, got .*a.png"):
        open_split(tmp_path / "a" / "elsewhere/nested/a.png", find=find_object_splits)
