"""Videos by class: folders and lists, splits, and what is wrong with them."""

import numpy as np
import pytest

from saccade.data.decode.video import VideoFile, write_video
from saccade.data.open import find_video_splits, open_split, open_train_and_val
from saccade.data.sources.base import DataError
from saccade.data.sources.videos import VideoFolder, VideoList, read_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two classes, train and val, three videos a class; frame 0 is as grey as the class number says."""
    root = tmp_path_factory.mktemp("videos")
    for split in ("train", "val"):
        for number, name in enumerate(("jump", "run fast")):
            for i in range(3):
                pixels = np.full((4, 16, 16, 3), 100 * number + 20, np.uint8)
                write_video(root / split / name / f"clip {i}.mp4", pixels)
    (root / "train" / "jump" / "notes.txt").write_text("not a video")
    return root


def test_folders_are_classes(folder):
    source = VideoFolder(folder / "train")
    assert (source.classes, source.labels.tolist()) == (["jump", "run fast"], [0, 0, 0, 1, 1, 1])
    video = source.read(4)
    assert isinstance(video, VideoFile)
    assert abs(np.array(next(video.frames([0]))).mean() - 120) < 3
    assert source.name(4).endswith("run fast/clip 1.mp4")


def test_splits_of_a_folder(folder):
    train, val = open_train_and_val(folder, find=find_video_splits)
    assert (len(train), len(val), train.classes) == (6, 6, ["jump", "run fast"])
    assert open_split(folder, find=find_video_splits).name(0).startswith(str(folder / "val"))
    assert len(open_split(folder / "train", find=find_video_splits)) == 6


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("train/jump/clip 0.mp4,jump\ntrain/run fast/clip 1.mp4,run fast\n", ["jump", "run fast"]),
        ("label,path\njump,train/jump/clip 0.mp4\nrun fast,train/run fast/clip 1.mp4\n", ["jump", "run fast"]),
        ("\ufeffpath\tlabel\ntrain/jump/clip 0.mp4\tjump\ntrain/run fast/clip 1.mp4\trun fast\n", ["jump", "run fast"]),
        ('"train/jump/clip 0.mp4","jump"\n"train/run fast/clip 1.mp4","run fast"\n', ["jump", "run fast"]),
        ("train/jump/clip 0.mp4 0\ntrain/run fast/clip 1.mp4 1\n", ["0", "1"]),
    ],
)
def test_lists_in_all_their_spellings(folder, text, label):
    path = folder / "list.csv"
    path.write_text(text)
    source = VideoList(path)
    assert (source.classes, source.labels.tolist()) == (label, [0, 1])
    assert len(source.read(1)) == 4
    path.unlink()


def test_numbers_may_have_names_beside_them(folder, tmp_path):
    (tmp_path / "train.csv").write_text("a.mp4,1\nb.mp4,0\n")
    (tmp_path / "val.csv").write_text("c.mp4,1\n")
    (tmp_path / "classes.txt").write_text("jump\nrun fast\n")
    splits = find_video_splits(tmp_path)
    assert list(splits) == ["train", "val"]
    source = splits["train"](classes=None)
    assert (source.classes, source.labels.tolist()) == (["jump", "run fast"], [1, 0])
    assert splits["val"](classes=source.classes).labels.tolist() == [1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "got an empty file"),
        ("path,label\n", "only a header"),
        ("a.mp4,jump\nb.mp4\n", "row 2: expected path and label, got 'b.mp4'"),
    ],
)
def test_a_bad_list_is_named(tmp_path, text, words):
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(DataError, match=words):
        read_rows(tmp_path / "list.csv")


def test_what_is_no_set_of_videos_is_named(tmp_path, folder):
    with pytest.raises(DataError, match="no data at"):
        find_video_splits(tmp_path / "nowhere")
    with pytest.raises(DataError, match="expected a list of videos"):
        find_video_splits(folder / "train" / "jump" / "clip 0.mp4")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.jpg").write_bytes(b"")
    with pytest.raises(DataError, match="has no videos"):
        VideoFolder(tmp_path)
    (tmp_path / "loose").mkdir()
    write_video(tmp_path / "loose" / "a.mp4", np.zeros((1, 16, 16, 3), np.uint8))
    with pytest.raises(DataError, match="1 videos directly in it"):
        VideoFolder(tmp_path / "loose")
    with pytest.raises(DataError, match="not in the training set: run fast"):
        VideoFolder(folder / "val", ["jump"])


def test_the_embedded_motions_open_by_name():
    train, val = open_train_and_val("motions", find=find_video_splits, motions=64, size=32, frames=4)
    assert (len(train), len(val)) == (64, 16)
    assert (train.split, val.split) == ("train", "val")
    assert len(train.read(0)) == 4
