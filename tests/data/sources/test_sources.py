"""Every kind of data set opens by its path alone, and a broken one says what is wrong before the first step."""

import io
import json
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from saccade.data.decode.image import BadImage
from saccade.data.open import find_splits, open_split, open_train_and_val
from saccade.data.sources import table
from saccade.data.sources.base import DataError, check_labels, hold_out
from saccade.data.sources.folder import FolderSource


def picture(value: int) -> bytes:
    """A PNG of one grey value, so that a picture can be recognised."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (value,) * 3).save(buffer, "PNG")
    return buffer.getvalue()


def grey(source, index: int) -> int:
    return source.read(index).getpixel((0, 0))[0]


def make_folder(root, counts: dict[str, int], start: int = 0):
    for number, (name, count) in enumerate(counts.items()):
        (root / name).mkdir(parents=True)
        for i in range(count):
            (root / name / f"{i}.png").write_bytes(picture(start + 10 * number + i))
    return root


def make_parquet(path, labels, names=None, values=None, column="image"):
    """In the convention of Hugging Face: struct {bytes, path}, metadata that names the classes."""
    values = range(len(labels)) if values is None else values
    images = pa.array(
        [{"bytes": picture(v), "path": None} for v in values], pa.struct([("bytes", "binary"), ("path", "string")])
    )
    built = pa.table({column: images, "label": pa.array(labels)})
    if names:
        features = {column: {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": names}}
        built = built.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(built, path, row_group_size=2)
    return path


def test_class_folders(tmp_path):
    source = FolderSource(make_folder(tmp_path, {"cat": 2, "ant": 3}))
    assert source.classes == ["ant", "cat"]
    assert source.labels.tolist() == [0, 0, 0, 1, 1]
    assert [grey(source, i) for i in range(5)] == [10, 11, 12, 0, 1]
    assert source.name(3).endswith("cat/0.png")


def test_pictures_may_lie_deeper_and_other_files_do_not_count(tmp_path):
    make_folder(tmp_path, {"a": 1, "b": 1})
    (tmp_path / "a/deep").mkdir()
    (tmp_path / "a/deep/x.JPG").write_bytes(picture(99))
    (tmp_path / "a/notes.txt").write_text("no picture")
    (tmp_path / "a/.hidden.png").write_bytes(picture(1))
    (tmp_path / ".git").mkdir()
    assert FolderSource(tmp_path).labels.tolist() == [0, 0, 1]


def test_folders_with_splits_share_their_class_numbers(tmp_path):
    make_folder(tmp_path / "train", {"a": 2, "b": 2, "c": 2})
    make_folder(tmp_path / "val", {"c": 1, "b": 1}, start=100)
    train, val = open_train_and_val(tmp_path)
    assert (train.classes, val.classes) == (["a", "b", "c"], ["a", "b", "c"])
    assert val.labels.tolist() == [1, 2]
    assert [grey(val, i) for i in (0, 1)] == [110, 100]


def test_without_a_validation_split_a_part_of_every_class_is_held_out(tmp_path):
    make_folder(tmp_path, {"a": 10, "b": 20})
    train, val = open_train_and_val(tmp_path, val_fraction=0.2, seed=3)
    assert np.bincount(val.labels).tolist() == [2, 4]
    names = [train.name(i) for i in range(len(train))] + [val.name(i) for i in range(len(val))]
    assert len(set(names)) == len(names) == 30
    again = open_train_and_val(tmp_path, val_fraction=0.2, seed=3)[1]
    assert [again.name(i) for i in range(6)] == [val.name(i) for i in range(6)]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda p: (p / "a").mkdir(), "has no images"),
        (lambda p: make_folder(p, {"only": 3}), "only one class"),
        (lambda p: (p / "x.png").write_bytes(picture(1)), "1 images directly in it"),
        (lambda p: None, "no sub-folders"),
        (lambda p: make_parquet(p / "train.parquet", [0, 1, 7], ["a", "b"]), "has 7, expected 0 to 1"),
        (lambda p: make_parquet(p / "train.parquet", [0, 1, -1], ["a", "b"]), "choose a labelled split"),
        (lambda p: make_parquet(p / "train.parquet", [1, 1], ["a", "b"]), r"only one class \('b'\)"),
        (lambda p: make_parquet(p / "train.parquet", [None, 1]), "1 rows of .* have no label"),
        (lambda p: make_parquet(p / "train.parquet", [0.5, 1.5]), "integer or string"),
        (lambda p: make_parquet(p / "train.parquet", [0, 1], column="pixels"), "data.image_column=NAME"),
        (lambda p: (p / "train.parquet").write_bytes(b"PAR1 broken"), "cannot read"),
    ],
)
def test_what_cannot_be_trained_on_is_told_before_the_first_step(tmp_path, build, words):
    build(tmp_path)
    with pytest.raises(DataError, match=words):
        open_train_and_val(tmp_path)


def test_a_path_that_holds_nothing(tmp_path):
    with pytest.raises(DataError, match="no data at"):
        find_splits(tmp_path / "missing")
    with pytest.raises(DataError, match="no file matches"):
        find_splits(tmp_path / "*.parquet")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(DataError, match=r"expected \.parquet"):
        find_splits(tmp_path / "notes.txt")


def test_a_class_that_only_validation_has(tmp_path):
    make_folder(tmp_path / "train", {"a": 2, "b": 2})
    make_folder(tmp_path / "val", {"z": 1})
    with pytest.raises(DataError, match="classes that are not in the training set: z"):
        open_train_and_val(tmp_path)


def test_parquet_by_file_folder_and_glob(tmp_path):
    names = ["first", "second"]
    make_parquet(tmp_path / "train-00000-of-00002.parquet", [0, 1, 0], names, [5, 6, 7])
    make_parquet(tmp_path / "train-00001-of-00002.parquet", [1, 1], names, [8, 9])
    make_parquet(tmp_path / "test.parquet", [1], names, [50])
    train, val = open_train_and_val(tmp_path)
    assert train.classes == names
    assert train.labels.tolist() == [0, 1, 0, 1, 1]
    assert [grey(train, i) for i in range(5)] == [5, 6, 7, 8, 9]
    assert grey(val, 0) == 50
    assert "row 4" in train.name(4)
    globbed = open_split(tmp_path / "train-*.parquet")
    assert [grey(globbed, i) for i in range(5)] == [5, 6, 7, 8, 9]
    single = open_split(tmp_path / "test.parquet")
    assert (len(single), grey(single, 0)) == (1, 50)


def test_parquet_with_string_labels_and_plain_bytes(tmp_path):
    built = pa.table({"img": pa.array([picture(1), picture(2), picture(3)]), "label": ["cat", "ant", "cat"]})
    pq.write_table(built, tmp_path / "all.parquet")
    source = open_split(tmp_path / "all.parquet")
    assert source.classes == ["ant", "cat"]
    assert source.labels.tolist() == [1, 0, 1]
    assert grey(source, 2) == 3


def test_parquet_that_stores_paths(tmp_path):
    (tmp_path / "a.png").write_bytes(picture(77))
    kind = pa.struct([("bytes", "binary"), ("path", "string")])
    rows = [{"bytes": None, "path": "a.png"}, {"bytes": None, "path": None}]
    pq.write_table(pa.table({"image": pa.array(rows, kind), "label": [0, 1]}), tmp_path / "all.parquet")
    source = open_split(tmp_path / "all.parquet")
    assert grey(source, 0) == 77
    with pytest.raises(BadImage, match="row 1: the row has no image"):
        source.read(1)


def test_parquet_too_large_for_memory_is_unpacked_once(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "MAX_IN_MEMORY", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = make_parquet(tmp_path / "train.parquet", [0, 1, 0, 1, 1], ["a", "b"], [3, 4, 5, 6, 7])
    for _ in range(2):
        source = open_split(path)
        assert [grey(source, i) for i in (4, 0, 2)] == [7, 3, 5]
    assert len(list((tmp_path / "cache/saccade").iterdir())) == 1


def test_a_hugging_face_set_saved_to_disk(tmp_path):
    """What Dataset.save_to_disk writes: Arrow streams, state.json, and dataset_dict.json above several splits."""
    for split, labels in (("train", [0, 1, 1]), ("test", [1])):
        folder = tmp_path / split
        folder.mkdir()
        path = make_parquet(tmp_path / "t.parquet", labels, ["a", "b"], [20 + i for i in range(len(labels))])
        built = pq.read_table(path)
        path.unlink()
        with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), built.schema) as writer:
            writer.write_table(built)
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_indices_data_files": None}
        (folder / "state.json").write_text(json.dumps(state))
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    train, val = open_train_and_val(tmp_path)
    assert (train.classes, train.labels.tolist(), val.labels.tolist()) == (["a", "b"], [0, 1, 1], [1])
    assert grey(train, 2) == 22
    assert open_split(tmp_path / "train").labels.tolist() == [0, 1, 1]


def make_shard(path, samples):
    with tarfile.open(path, "w") as tar:
        for key, members in samples.items():
            for suffix, data in members.items():
                info = tarfile.TarInfo(f"{key}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def test_webdataset_shards(tmp_path):
    make_shard(
        tmp_path / "train-0.tar", {"s/0": {"png": picture(1), "cls": b"0"}, "s/1": {"cls": b"2\n", "png": picture(2)}}
    )
    make_shard(tmp_path / "train-1.tar", {"7": {"png": picture(3), "json": b'{"label": 1}'}})
    make_shard(tmp_path / "val-0.tar", {"9": {"png": picture(4), "cls": b"1"}})
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\n")
    train, val = open_train_and_val(tmp_path)
    assert train.classes == val.classes == ["ant", "bee", "cat"]
    assert (train.labels.tolist(), val.labels.tolist()) == ([0, 2, 1], [1])
    assert [grey(train, i) for i in (2, 0, 1)] == [3, 1, 2]
    assert "s/1" in train.name(1)


def test_a_shard_without_labels(tmp_path):
    make_shard(tmp_path / "a.tar", {"0": {"png": picture(1)}})
    with pytest.raises(DataError, match=r"expected 0\.cls"):
        open_split(tmp_path / "a.tar")
    (tmp_path / "b.tar").write_bytes(b"x" * 2000)
    with pytest.raises(DataError, match=r"uncompressed \.tar"):
        open_split(tmp_path / "b.tar")


def test_classes_of_a_checkpoint_are_matched_by_name(tmp_path):
    make_folder(tmp_path, {"b": 1, "c": 1})
    source = open_split(tmp_path, classes=["a", "b", "c", "d"])
    assert source.labels.tolist() == [1, 2]
    path = make_parquet(tmp_path / "x.parquet", [0, 1], ["c", "a"])
    source = open_split(path, classes=["a", "b", "c", "d"])
    assert (source.labels.tolist(), source.classes) == ([2, 0], ["a", "b", "c", "d"])
    with pytest.raises(DataError, match="unknown: zebra"):
        open_split(make_parquet(tmp_path / "y.parquet", [0, 1], ["a", "zebra"]), classes=["a", "b"])


def test_hold_out_needs_something_to_hold_out(tmp_path):
    source = FolderSource(make_folder(tmp_path, {"a": 1, "b": 5}))
    with pytest.raises(DataError, match="'a' has only one image"):
        hold_out(source, 0.5)
    with pytest.raises(DataError, match="between 0 and 1"):
        hold_out(source, 1.5)


def test_a_class_without_rows_is_only_a_warning(tmp_path, caplog):
    """A subset of a large set keeps the large set's names."""
    make_parquet(tmp_path / "train.parquet", [0, 2] * 5, ["a", "b", "c"])
    train, _ = open_train_and_val(tmp_path)
    assert train.classes == ["a", "b", "c"]
    assert "1 of 3 classes have no training images: 'b'" in caplog.text


def test_an_empty_set_is_told(tmp_path):
    source = open_split(make_parquet(tmp_path / "x.parquet", pa.array([], pa.int64()), ["a", "b"], []))
    with pytest.raises(DataError, match="is empty"):
        check_labels(source)
