"""WebDataset shards."""

import pytest

from saccade.data.sources.base import DataError
from saccade.data.sources.shards import ShardSource
from tests.data.image_files import grey, png, write_shard


def test_samples_of_several_shards_are_read_in_any_order(tmp_path):
    files = [
        write_shard(tmp_path / "0.tar", {"s/0": {"png": png(1), "cls": b"0"}, "s/1": {"cls": b"2\n", "png": png(2)}}),
        write_shard(tmp_path / "1.tar", {"7": {"png": png(3), "json": b'{"label": 1}'}}),
    ]
    source = ShardSource(files)
    assert source.classes == ["0", "1", "2"]
    assert source.labels.tolist() == [0, 2, 1]
    assert [grey(source, i) for i in (2, 0, 1)] == [3, 1, 2]
    assert source.name(1) == f"{files[0]}, s/1"
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\n")
    assert ShardSource(files).classes == ["ant", "bee", "cat"]
    assert ShardSource(files, ["x", "y", "z"]).classes == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"png": png(1)}, r"1 images of .* have no label: expected 0\.cls"),
        ({"png": png(1), "cls": b"cat"}, r"0\.cls: expected an integer label"),
        ({"png": png(1), "json": b'{"name": "cat"}'}, r"0\.json: expected an integer label"),
    ],
)
def test_shard_without_valid_label_raises(tmp_path, members, message):
    with pytest.raises(DataError, match=message):
        ShardSource([write_shard(tmp_path / "a.tar", {"0": members})])


def test_compressed_or_damaged_shard_raises(tmp_path):
    (tmp_path / "b.tar").write_bytes(b"x" * 2000)
    with pytest.raises(DataError, match=r"expected an uncompressed \.tar file, got .*b\.tar"):
        ShardSource([tmp_path / "b.tar"])
