"""Image folders."""

import pytest

from saccade.data.sources.base import DataError
from saccade.data.sources.folder import FolderSource
from tests.data.image_files import grey, png, write_folder


def test_sub_folders_are_classes_in_sorted_order(tmp_path):
    source = FolderSource(write_folder(tmp_path, {"cat": 2, "ant": 3}))
    assert source.classes == ["ant", "cat"]
    assert source.labels.tolist() == [0, 0, 0, 1, 1]
    assert [grey(source, i) for i in range(5)] == [10, 11, 12, 0, 1]
    assert source.name(3) == str(tmp_path / "cat/0.png")


def test_nested_images_count_and_other_or_hidden_files_do_not(tmp_path):
    write_folder(tmp_path, {"a": 1, "b": 1})
    (tmp_path / "a/nested").mkdir()
    (tmp_path / "a/nested/x.JPG").write_bytes(png(99))
    (tmp_path / "a/notes.txt").write_text("not an image")
    (tmp_path / "a/.hidden.png").write_bytes(png(1))
    (tmp_path / "a/.cache").mkdir()
    (tmp_path / "a/.cache/x.png").write_bytes(png(1))
    (tmp_path / ".git").mkdir()
    source = FolderSource(tmp_path)
    assert source.labels.tolist() == [0, 0, 1]
    assert [grey(source, i) for i in range(3)] == [0, 99, 10]


def test_classes_of_another_split_decide_the_indices(tmp_path):
    write_folder(tmp_path, {"b": 1, "c": 1})
    assert FolderSource(tmp_path, ["a", "b", "c"]).labels.tolist() == [1, 2]
    with pytest.raises(DataError, match="has classes that are not in the training set: c"):
        FolderSource(tmp_path, ["a", "b"])


def test_unusable_folders_raise(tmp_path):
    with pytest.raises(DataError, match=r"expected one sub-folder of images per class in .*, got no sub-folders"):
        FolderSource(tmp_path)
    (tmp_path / "x.png").write_bytes(png(1))
    with pytest.raises(DataError, match="got 1 images directly in it"):
        FolderSource(tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match=r"the class folder .*/a has no images"):
        FolderSource(tmp_path)
