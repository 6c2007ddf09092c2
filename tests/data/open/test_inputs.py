"""Unlabelled images of any source, in order, with stable ids."""

import io
import os
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from saccade.data.decode.image import BadImage
from saccade.data.open.inputs import Inputs, read_entries
from saccade.data.sources.base import DataError


def encode(value: int, format: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (value, 0, 0)).save(file, format)
    return file.getvalue()


def red(item) -> int:
    return item.decode().getpixel((0, 0))[0]


def write_images(folder, names):
    for value, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(value))
    return folder


def write_tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return path


def write_parquet(path, cells, rows_per_group=4, **columns):
    pq.write_table(pa.table({"image": cells, **columns}), path, row_group_size=rows_per_group)
    return path


def test_folder_is_walked_in_sorted_order_without_other_files(tmp_path):
    write_images(tmp_path, ["b/x.png", "a.png", "c.png", "b/y/z.png"])
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / ".hidden.png").write_bytes(b"")
    items = list(Inputs(tmp_path))
    assert [os.path.relpath(item.name, tmp_path) for item in items] == ["a.png", "b/x.png", "b/y/z.png", "c.png"]
    assert [item.id for item in items] == [0, 1, 2, 3]
    assert [red(item) for item in items] == [1, 0, 3, 2]
    assert Inputs(tmp_path).summary()[0] == 4


def test_globs_and_lists_are_read_in_their_order(tmp_path):
    write_images(tmp_path, ["0.png", "1.png", "2.png"])
    assert [red(item) for item in Inputs(f"{tmp_path}/[12].png")] == [1, 2]
    assert [red(item) for item in Inputs([tmp_path / "2.png", tmp_path / "0.png"])] == [2, 0]
    assert [item.id for item in Inputs([str(tmp_path), tmp_path / "0.png"])] == [0, 1, 2, 3]
    with pytest.raises(DataError, match=r"no images at .*absent: expected a folder"):
        Inputs(tmp_path / "absent")


def test_parquet_rows_hold_bytes_structs_or_paths(tmp_path):
    write_images(tmp_path, ["0.png", "1.png"])
    plain = write_parquet(tmp_path / "a.parquet", [encode(5), b"broken", None, encode(7)], rows_per_group=2)
    items = list(Inputs(plain))
    assert [item.id for item in items] == [0, 1, 2, 3]
    assert (red(items[0]), red(items[3])) == (5, 7)
    for item, reason in ((items[1], "not a readable image"), (items[2], "the row has no image")):
        with pytest.raises(BadImage, match=rf"a\.parquet, row {item.id}: {reason}"):
            item.decode()
    cells = [{"bytes": encode(9), "path": None}, {"bytes": None, "path": "1.png"}]
    assert [red(item) for item in Inputs(write_parquet(tmp_path / "b.parquet", cells))] == [9, 1]
    named = write_parquet(tmp_path / "c.parquet", [1], photo=[encode(3)])
    assert [red(item) for item in Inputs(named, image_column="photo")] == [3]


def test_a_cell_is_never_read_as_a_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_parquet("a.parquet", ["http://127.0.0.1:9/a.png"])
    (item,) = Inputs("a.parquet")
    with pytest.raises(BadImage, match="no such file"):
        item.decode()


def test_tar_members_are_located(tmp_path):
    members = {"a.png": encode(1), "a.json": b"{}", "sub/b.png": encode(2), "c.jpg": b""}
    items = list(Inputs(write_tar(tmp_path / "x.tar", members)))
    assert [item.name for item in items] == [f"{tmp_path}/x.tar, {name}" for name in ("a.png", "sub/b.png", "c.jpg")]
    assert [red(item) for item in items[:2]] == [1, 2]
    with pytest.raises(BadImage, match=r"x\.tar, c\.jpg: the file is empty"):
        items[2].decode()


def test_shards_of_a_folder_follow_each_other(tmp_path):
    for shard in range(2):
        write_tar(tmp_path / f"{shard}.tar", {f"{i}.png": encode(10 * shard + i) for i in range(3)})
    items = list(Inputs(tmp_path))
    assert [(item.id, red(item)) for item in items] == [(0, 0), (1, 1), (2, 2), (3, 10), (4, 11), (5, 12)]


@pytest.mark.parametrize("kind", ["folder", "parquet", "tar"])
def test_skipped_ids_are_left_out_and_others_keep_theirs(tmp_path, kind):
    if kind == "folder":
        source = write_images(tmp_path / "images", [f"{i}.png" for i in range(10)])
    elif kind == "parquet":
        source = write_parquet(tmp_path / "a.parquet", [encode(i) for i in range(10)])
    else:
        source = write_tar(tmp_path / "a.tar", {f"{i}.png": encode(i) for i in range(10)})
    skip = {0, 1, 2, 3, 5, 9}
    assert [(item.id, red(item)) for item in Inputs(source).items(skip)] == [(i, i) for i in (4, 6, 7, 8)]


def test_skipped_row_groups_are_not_read(tmp_path, monkeypatch):
    source = write_parquet(tmp_path / "a.parquet", [encode(i) for i in range(10)], rows_per_group=4)
    groups, iter_batches = [], pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile,
        "iter_batches",
        lambda self, *args, **options: groups.append(options["row_groups"]) or iter_batches(self, *args, **options),
    )
    assert [item.id for item in Inputs(source).items({0, 1, 2, 3, 5})] == [4, 6, 7, 8, 9]
    assert groups == [[1], [2]]


def test_damaged_containers_are_one_bad_image(tmp_path):
    write_images(tmp_path, ["z.png"])
    (tmp_path / "a.parquet").write_bytes(b"nothing")
    (tmp_path / "b.tar").write_bytes(b"nothing at all")
    items = list(Inputs([tmp_path / "a.parquet", tmp_path / "b.tar", tmp_path / "z.png"]))
    assert [item.id for item in items] == [0, 1, 2]
    for item, reason in zip(items, ("cannot read Parquet", r"expected an uncompressed \.tar"), strict=False):
        with pytest.raises(BadImage, match=reason) as error:
            item.decode()
        assert "\n" not in str(error.value)
    assert red(items[2]) == 0


def test_summary_tells_sources_apart(tmp_path):
    write_images(tmp_path / "one", ["a.png", "b.png"])
    first = Inputs(tmp_path / "one").summary()
    assert Inputs(tmp_path / "one").summary() == first
    write_images(tmp_path / "one", ["c.png"])
    assert Inputs(tmp_path / "one").summary() != first


def test_urls_of_images_shards_and_tables(tmp_path, serve_folder):
    write_images(tmp_path, ["0.png", "1.png"])
    write_tar(tmp_path / "a.tar", {"x.png": encode(20), "y.png": encode(21)})
    write_parquet(tmp_path / "a.parquet", [encode(30), encode(31)])
    with serve_folder(tmp_path) as address:
        sources = [f"{address}/1.png", f"{address}/a.tar", f"{address}/a.parquet", f"{address}/absent.png"]
        items = list(Inputs(sources))
        assert [red(item) for item in items[:5]] == [1, 20, 21, 30, 31]
        assert [item.id for item in items] == list(range(6))
        with pytest.raises(BadImage, match=r"absent\.png: "):
            items[5].decode()
    local = list(Inputs(f"file://{tmp_path}/*.png"))
    assert [red(item) for item in local] == [0, 1]
    assert [red(item) for item in Inputs("file://" + str(write_images(tmp_path / "sub", ["u/v.png"])))] == [0]


def test_names_that_are_not_utf8_are_read(tmp_path):
    folder = write_images(tmp_path, [os.fsdecode(b"caf\xe9.png")])
    (item,) = Inputs(folder)
    assert item.name.endswith(r"caf\xe9.png")
    assert red(item) == 0
    assert Inputs(folder).summary()[0] == 1


def test_gigantic_image_is_refused_before_decoding(tmp_path):
    Image.fromarray(np.zeros((1, 1), np.uint8)).resize((20000, 7000)).convert("1").save(tmp_path / "a.png")
    (item,) = Inputs(tmp_path)
    with pytest.raises(BadImage, match="expected at most 120 megapixels, got 140"):
        item.decode()


def test_entries_read_the_same_images_elsewhere(tmp_path):
    """Entries are data, so that another process opens the images; rows of Parquet are read in one pass per file."""
    write_images(tmp_path / "files", ["a.png", "b.png"])
    write_tar(tmp_path / "shard.tar", {"x.png": encode(7), "x.cls": b"1", "y.png": encode(8)})
    write_parquet(tmp_path / "table.parquet", [encode(i) for i in range(9)])
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    sources = [tmp_path / "files", tmp_path / "shard.tar", tmp_path / "table.parquet", tmp_path / "bad.parquet"]
    inputs = Inputs(sources)
    entries = list(inputs.entries())
    assert [entry.id for entry in entries] == list(range(14))
    items, read = list(inputs), list(read_entries(entries))
    assert [(item.id, item.name) for item in read] == [(item.id, item.name) for item in items]
    assert [red(item) for item in read[:-1]] == [0, 1, 7, 8, *range(9)] == [red(item) for item in items[:-1]]
    with pytest.raises(BadImage, match="cannot read Parquet"):
        read[-1].decode()
    some = [entries[1], entries[6], entries[11]]
    assert [red(item) for item in read_entries(some)] == [1, 2, 7]


def test_damaged_row_group_is_an_error_of_its_rows(tmp_path):
    path = write_parquet(tmp_path / "table.parquet", [encode(i) for i in range(12)])
    content = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    content[start : start + 64] = b"\xff" * 64
    path.write_bytes(bytes(content))
    items = list(Inputs(path))
    assert [item.id for item in items] == list(range(12))
    assert [item.id for item in items if isinstance(item.content, BadImage)] == [4, 5, 6, 7]
    assert "row 4: cannot read Parquet" in str(items[4].content)
    assert red(items[8]) == 8
