"""Images without labels: folders of any depth, Parquet without a label column."""

import pyarrow.parquet as pq
import pytest

from saccade.data.open import find_unlabelled_splits, open_train_and_val
from saccade.data.sources.base import DataError
from tests.data.image_files import grey, png, write_folder, write_parquet


def test_images_of_a_folder_and_its_sub_folders_are_read(tmp_path):
    write_folder(tmp_path / "images", {"b": 2, "c/d": 1}, start=20)
    (tmp_path / "images/a.png").write_bytes(png(7))
    (tmp_path / "images/notes.txt").write_text("no image")
    source = find_unlabelled_splits(tmp_path / "images")["all"](classes=None)
    assert [grey(source, i) for i in range(len(source))] == [7, 20, 21, 30]
    assert source.name(1).endswith("b/0.png")
    train, val = open_train_and_val(tmp_path / "images", val_fraction=0.25, find=find_unlabelled_splits)
    assert (len(train), len(val)) == (3, 1)
    with pytest.raises(DataError, match=r"expected images in .* got none"):
        find_unlabelled_splits(write_folder(tmp_path / "empty", {"x": 0}))["all"](classes=None)


def test_parquet_needs_no_label_column(tmp_path):
    labelled = write_parquet(tmp_path / "labelled.parquet", [0, 1, 1], ["a", "b"], [5, 6, 7])
    pq.write_table(pq.read_table(labelled).select(["image"]), tmp_path / "train.parquet")
    labelled.rename(tmp_path / "val.parquet")
    train, val = open_train_and_val(tmp_path, find=find_unlabelled_splits)
    for source in (train, val):
        assert [grey(source, i) for i in range(3)] == [5, 6, 7]
        assert source.labels.tolist() == [0, 0, 0]
