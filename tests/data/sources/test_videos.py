"""Labelled videos in folders and lists."""

import numpy as np
import pytest

from saccade.data.decode.video import VideoFile, write_video
from saccade.data.sources.base import DataError
from saccade.data.sources.lists import read_rows
from saccade.data.sources.videos import VideoFolder, VideoList


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two classes with three videos each; class k has the grey value 100 k + 20."""
    root = tmp_path_factory.mktemp("videos")
    for label, name in enumerate(("jump", "run fast")):
        for i in range(3):
            write_video(root / name / f"clip {i}.mp4", np.full((4, 16, 16, 3), 100 * label + 20, np.uint8))
    (root / "jump" / "notes.txt").write_text("not a video")
    return root


def test_sub_folders_are_classes(folder):
    source = VideoFolder(folder)
    assert (source.classes, source.labels.tolist()) == (["jump", "run fast"], [0, 0, 0, 1, 1, 1])
    video = source.read(4)
    assert isinstance(video, VideoFile)
    assert abs(np.array(next(video.frames([0]))).mean() - 120) < 3
    assert source.name(4) == str(folder / "run fast/clip 1.mp4")


@pytest.mark.parametrize(
    ("text", "classes"),
    [
        ("jump/clip 0.mp4,jump\nrun fast/clip 1.mp4,run fast\n", ["jump", "run fast"]),
        ("label,path\njump,jump/clip 0.mp4\nrun fast,run fast/clip 1.mp4\n", ["jump", "run fast"]),
        ("\ufeffpath\tlabel\njump/clip 0.mp4\tjump\nrun fast/clip 1.mp4\trun fast\n", ["jump", "run fast"]),
        ('"jump/clip 0.mp4","jump"\n"run fast/clip 1.mp4","run fast"\n', ["jump", "run fast"]),
        ("jump/clip 0.mp4 0\nrun fast/clip 1.mp4 1\n", ["0", "1"]),
    ],
)
def test_lists_with_any_delimiter_and_header(folder, text, classes):
    path = folder / "list.csv"
    path.write_text(text)
    source = VideoList(path)
    assert (source.classes, source.labels.tolist()) == (classes, [0, 1])
    assert len(source.read(1)) == 4
    assert source.name(1) == str(folder / "run fast/clip 1.mp4")
    path.unlink()


def test_classes_of_another_split_decide_the_indices(tmp_path):
    (tmp_path / "list.csv").write_text("a.mp4,run\nb.mp4,jump\n")
    assert VideoList(tmp_path / "list.csv", ["jump", "walk", "run"]).labels.tolist() == [2, 0]
    with pytest.raises(DataError, match="not in the training set: run"):
        VideoList(tmp_path / "list.csv", ["jump"])


def test_index_labels_are_named_by_classes_txt(tmp_path):
    (tmp_path / "list.csv").write_text("a.mp4,1\nb.mp4,0\n")
    (tmp_path / "classes.txt").write_text("jump\nrun fast\n")
    source = VideoList(tmp_path / "list.csv", root="/videos")
    assert (source.classes, source.labels.tolist()) == (["jump", "run fast"], [1, 0])
    assert source.name(0) == "/videos/a.mp4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected rows of path and label, got an empty file"),
        ("path,label\n", "expected rows of path and label, got only a header"),
        ("a.mp4,jump\nb.mp4\n", "row 2: expected path and label, got 'b.mp4'"),
    ],
)
def test_invalid_list_raises(tmp_path, text, message):
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        read_rows(tmp_path / "list.csv")


def test_unusable_folder_raises(tmp_path, folder):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.jpg").write_bytes(b"")
    with pytest.raises(DataError, match="images has no videos"):
        VideoFolder(tmp_path)
    write_video(tmp_path / "flat" / "a.mp4", np.zeros((1, 16, 16, 3), np.uint8))
    with pytest.raises(DataError, match="1 videos directly in it"):
        VideoFolder(tmp_path / "flat")
    with pytest.raises(DataError, match="not in the training set: run fast"):
        VideoFolder(folder, ["jump"])
