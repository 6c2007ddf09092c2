"""Every fuzz target for a few hundred inputs, and what longer runs found."""

import json
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from saccade.data.decode.image import BadImage, read_image, to_rgb
from saccade.data.decode.video import BadVideo, VideoFile
from saccade.data.sources.base import DataError
from saccade.data.sources.coco import CocoSource, render_mask
from saccade.data.sources.shards import ShardSource
from saccade.data.sources.table import TableSource, encoded_cell
from saccade.engine.recipe import RecipeError, load_recipe
from saccade.models.card import read_card
from saccade.models.checkpoint import save_checkpoint
from saccade.tasks.load import load
from saccade.weights.read import CheckpointError, read_state_dict, unwrap
from tests.fuzz.driver import MAX_MEGABYTES, MAX_SECONDS, run
from tests.fuzz.targets import TARGETS, Tiny

INPUTS = 300
ACCEPTED_SEEDS = {  # of all; the others are rejected by intention
    "image": 22, "checkpoint": 9, "card": 3, "coco": 4, "parquet": 6, "tar": 3, "video": 4, "recipe": 3, "upload": 22,
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_only_own_errors_escape(name):
    report = run(name, INPUTS)
    assert report.failures == {}
    assert report.inputs == INPUTS
    assert 0 < report.rejected < INPUTS
    assert report.peak_megabytes - report.libraries_megabytes < MAX_MEGABYTES
    assert report.slowest_seconds < MAX_SECONDS


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_reach_the_reader(name):
    """A target whose seeds are all rejected would test nothing but the first check."""
    target, accepted = TARGETS[name], 0
    for seed in target.seeds():
        try:
            target.run(seed)
            accepted += 1
        except target.errors:
            pass
    assert accepted == ACCEPTED_SEEDS[name]


def test_driver_reports_an_error_that_escapes(monkeypatch, tmp_path):
    target = TARGETS["tar"]._replace(run=lambda data: pickle.loads(b""))
    monkeypatch.setitem(TARGETS, "tar", target)
    report = run("tar", 3)
    assert list(report.failures) == ["EOFError at ?"]


# Checkpoints


def torch_file(path: Path, content: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
    return path


def test_checkpoint_cannot_allocate_a_byte_array(tmp_path):
    content = b"\x80\x02cbuiltins\nbytearray\nq\x00J\xff\xff\xff\x7f\x85q\x01Rq\x02."  # bytearray(2**31 - 1)
    with pytest.raises(CheckpointError, match="byte arrays besides tensors"):
        read_state_dict(torch_file(tmp_path / "a.pth", content))
    with pytest.raises(CheckpointError, match="expected an uncompressed torch file"):
        read_state_dict(torch_file(tmp_path / "b.pth", content, zipfile.ZIP_DEFLATED))


@pytest.mark.parametrize("content", [b"\x80\x02.", b"\x80\x02}q", b"\x80\x02X\xff\xff\xff\x7fa", b"\x80\x02K", b""])
def test_damaged_pickle_is_a_checkpoint_error(tmp_path, content):
    with pytest.raises(CheckpointError):
        read_state_dict(torch_file(tmp_path / "a.pth", content))


def test_checkpoint_cannot_claim_more_than_its_file(tmp_path):
    """A size of 4 GB in the directory of a file of 2 kB was allocated and took 20 seconds."""
    path = torch_file(tmp_path / "a.pth", b"\x80\x02}.")
    data = bytearray(path.read_bytes())
    entry = data.index(b"PK\x01\x02")  # the first entry of the directory
    for sizes in ((4, 2**31), (2**31, 2**31)):
        data[entry + 20 : entry + 28] = struct.pack("<II", *sizes)  # stored, original
        path.write_bytes(bytes(data))
        with pytest.raises(CheckpointError, match="entries are larger than the file"):
            read_state_dict(path)


def test_dict_that_contains_itself_is_refused():
    checkpoint: dict = {}
    checkpoint["model"] = checkpoint
    with pytest.raises(CheckpointError, match="within 8 nested dicts"):
        unwrap(checkpoint)


# Cards


def card_file(path: Path, **metadata: str) -> Path:
    metadata = {"saccade.model": "svit_nano"} | {f"saccade.{key}": value for key, value in metadata.items()}
    header = {"__metadata__": metadata, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    return path


@pytest.mark.parametrize(
    "metadata",
    [
        {"kwargs": "{"},
        {"kwargs": "[1]"},
        {"num_classes": "many"},
        {"num_classes": "-1"},
        {"classes": '{"a": 1}'},
        {"preprocess": '{"size": 0}'},
        {"preprocess": '{"mean": ["a"]}'},
        {"preprocess": '{"mean": [NaN]}'},
        {"preprocess": '{"unknown": 1}'},
        {"kwargs": "[" * 10_000},
        {"shorter": "0"},
    ],
    ids=str,
)
def test_damaged_card_is_a_checkpoint_error(tmp_path, metadata):
    with pytest.raises(CheckpointError, match=r"the card of .* is damaged"):
        read_card(card_file(tmp_path / "a.safetensors", **metadata))


@pytest.mark.parametrize(
    "metadata",
    [
        {"kwargs": '{"pretrained": true}'},
        {"kwargs": '{"checkpoint_path": "/etc/passwd"}'},
        {"kwargs": '{"pretrained_cfg": {"url": "http://127.0.0.1/"}}'},
        {"head_kwargs": '{"pretrained": true}'},
        {"model": "hf-hub:owner/name"},
        {"model": "local-dir:/etc"},
    ],
    ids=str,
)
def test_card_cannot_name_another_source(tmp_path, metadata):
    with pytest.raises(CheckpointError, match=r"invalid (kwargs|model)"):
        read_card(card_file(tmp_path / "a.safetensors", **metadata))


def test_card_cannot_allocate_more_than_its_file(tmp_path):
    """Petabytes of weights in the options, four bytes in the file: refused before anything is allocated."""
    path = card_file(tmp_path / "a.safetensors", kwargs='{"dims": [6000000, 6000000, 6000000, 6000000]}')
    with pytest.raises(CheckpointError, match="expected a checkpoint of"):
        load(path)
    with pytest.raises(CheckpointError, match="expected a card whose model can be built"):
        load(card_file(tmp_path / "b.safetensors", kwargs='{"unknown_option": 1}'))


def test_small_foreign_checkpoint_is_refused_without_building_every_model(tmp_path, monkeypatch):
    monkeypatch.setattr("saccade.models.checkpoint.create_model", lambda name: pytest.fail("built a model"))
    save_checkpoint(Tiny(), tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="no registered model"):
        read_card(tmp_path / "a.safetensors")


# Images and videos


def test_large_image_in_a_few_bytes_is_refused(tmp_path):
    """A damaged height once took 15 seconds and 600 MB to decode 464 bytes."""
    Image.new("L", (12, 9)).save(tmp_path / "a.tif")
    data = bytearray((tmp_path / "a.tif").read_bytes())
    entry = data.index(struct.pack("<HHI", 257, 4, 1)) if struct.pack("<HHI", 257, 4, 1) in data else None
    if entry is None:
        entry = data.index(struct.pack("<HHI", 257, 3, 1))
        data[entry : entry + 12] = struct.pack("<HHII", 257, 4, 1, 2_000_000)
    else:
        data[entry + 8 : entry + 12] = struct.pack("<I", 2_000_000)
    with pytest.raises(BadImage, match=r"expected (sides of at most|the content of)"):
        read_image(bytes(data))


@pytest.mark.parametrize(("kind", "side"), [("WEBP", 8000), ("JPEG2000", 6000)])
def test_decoders_with_large_buffers_have_lower_limits(kind, side, monkeypatch):
    monkeypatch.setattr("saccade.data.decode.image.MAX_PIXELS_OF", {kind: 99})
    import io

    stream = io.BytesIO()
    Image.new("RGB", (10, 10)).save(stream, kind)
    with pytest.raises(BadImage, match="expected at most 0 megapixels"):
        read_image(stream.getvalue())
    from saccade.data.decode import image

    monkeypatch.undo()
    assert image.MAX_PIXELS_OF[kind] < side**2 < image.MAX_PIXELS


def test_bands_give_the_same_image(monkeypatch):
    import io

    pixels = np.random.default_rng(0).integers(0, 256, (37, 11, 4), np.uint8)
    grey = np.random.default_rng(0).integers(0, 65536, (37, 11)).astype(np.uint16)
    palette = Image.fromarray(pixels[..., :3]).quantize(8)
    for image, options in ((Image.fromarray(pixels), {}), (Image.fromarray(grey), {}), (palette, {"transparency": 3})):
        stream = io.BytesIO()
        image.save(stream, "PNG", **options)
        monkeypatch.setattr("saccade.data.decode.image.BAND", 10**6)
        expected = np.array(read_image(stream.getvalue()))
        monkeypatch.setattr("saccade.data.decode.image.BAND", 50)  # 4 rows
        np.testing.assert_array_equal(np.array(read_image(stream.getvalue())), expected)


def test_damaged_exif_data_has_no_orientation():
    """A decoded image keeps its EXIF data, and `saccade.predict` reads them again."""
    import io

    exif, stream = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    Image.new("RGB", (12, 9)).save(stream, "JPEG", exif=exif)
    assert read_image(stream.getvalue()).size == (9, 12)
    image = read_image(stream.getvalue().replace(b"MM\0*", b"rM\0*"))
    assert image.size == to_rgb(image).size == (12, 9)


def test_conversion_does_not_change_its_argument():
    image = Image.new("RGB", (12, 9))
    image.getexif()[0x0112] = 6
    assert to_rgb(image).size == (9, 12)
    assert image.size == (12, 9)


def test_device_is_not_read():
    with pytest.raises(BadImage, match="got a device or a pipe"):
        read_image("/dev/zero")


@pytest.mark.parametrize("text", ["#EXTM3U\n#EXTINF:1,\n{}\n#EXT-X-ENDLIST\n", "ffconcat version 1.0\nfile {}\n"])
def test_playlist_does_not_open_other_files(tmp_path, text):
    from saccade.data.decode.video import write_video

    write_video(tmp_path / "secret.mp4", np.zeros((2, 16, 16, 3), np.uint8))
    path = tmp_path / "clip.mp4"
    path.write_text(text.format(tmp_path / "secret.mp4"))
    with pytest.raises(BadVideo):
        VideoFile(path)


def test_video_frames_have_a_limit(tmp_path, monkeypatch):
    from saccade.data.decode import video

    video.write_video(tmp_path / "a.mp4", np.zeros((2, 32, 32, 3), np.uint8))
    monkeypatch.setattr(video, "MAX_PIXELS", 1000)
    with pytest.raises(BadVideo, match=r"expected at most 0 megapixels per frame, got 32 x 32"):
        VideoFile(tmp_path / "a.mp4")


# Data sets


@pytest.mark.parametrize(
    "segmentation",
    [
        [[1, 1, 6, 1, 6, 6, 1, float("inf")]],  # crashed the process
        [[1, 1, 6, 1, 6, float("nan")]],
        [[0, 0, 1e9, 0, 1e9, 1e9]],
        [[0, 0, 6, "a", 6, 6]],
        {"size": [8, 8], "counts": "PPPPPPPPPPPP"},  # the string ends inside a number
        {"size": [8, 8], "counts": "\x7f\x01"},
        {"size": [8, 8], "counts": [1, 2**40]},
        {"size": [8, 8], "counts": [-1, 65]},
        {"size": [8, 8], "counts": [1, 2]},
        {"size": [8, 8], "counts": 5},
        {"size": 8, "counts": [64]},
        {"counts": [64]},
    ],
    ids=str,
)
def test_invalid_segmentation_is_a_data_error(segmentation):
    with pytest.raises(DataError, match="annotation 3: invalid segmentation"):
        render_mask(segmentation, (8, 8), 3, Path("a.json"))


VALID = {
    "images": [{"id": 1, "file_name": "image.png", "width": 8, "height": 8}],
    "categories": [{"id": 3, "name": "cat"}],
    "annotations": [{"id": 1, "image_id": 1, "category_id": 3, "bbox": [1, 1, 5, 5]}],
}


@pytest.mark.parametrize(
    "change",
    [
        {"images": 5},
        {"images": [5]},
        {"images": [{"id": "a", "file_name": "image.png"}]},
        {"images": [{"id": 2**64, "file_name": "image.png"}]},
        {"images": [{"id": 1, "file_name": None}]},
        {"images": [{"id": 1, "file_name": "a\0b"}]},
        {"images": [{"id": 1, "file_name": "image.png", "width": "8", "height": 8}]},
        {"categories": [{"id": [], "name": "cat"}]},
        {"categories": [{"id": 3}]},
        {"annotations": [VALID["annotations"][0] | {"image_id": []}]},
        {"annotations": [VALID["annotations"][0] | {"bbox": [1, 1, 5, 10**400]}]},
        {"annotations": [VALID["annotations"][0] | {"iscrowd": [0]}]},
        {"annotations": [VALID["annotations"][0] | {"segmentation": 7}]},
    ],
    ids=lambda change: str(change)[:60],
)
def test_invalid_annotation_file_is_a_data_error(tmp_path, change):
    Image.new("RGB", (8, 8)).save(tmp_path / "image.png")
    (tmp_path / "a.json").write_text(json.dumps(VALID))
    assert len(CocoSource(tmp_path / "a.json", tmp_path)) == 1
    (tmp_path / "a.json").write_text(json.dumps(VALID | change))
    with pytest.raises(DataError):
        CocoSource(tmp_path / "a.json", tmp_path)


def test_deeply_nested_json_is_a_data_error(tmp_path):
    (tmp_path / "a.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match="cannot read"):
        CocoSource(tmp_path / "a.json", tmp_path)


def test_shard_with_a_damaged_header_is_a_data_error(tmp_path):
    seed = bytearray(TARGETS["tar"].seeds()[0])
    seed[124:136] = b"\x80" + b"\xff" * 11  # the size of the first member
    seed[148:156] = b" " * 8
    seed[148:156] = b"%06o\0 " % sum(seed[:512])
    (tmp_path / "a.tar").write_bytes(bytes(seed))
    with pytest.raises(DataError):
        ShardSource([tmp_path / "a.tar"])


@pytest.mark.parametrize("size", [b"77777777777", b"\x80" + b"\0" * 3 + b"\x7f" * 8], ids=["8 GB", "2^62"])
def test_shard_with_a_huge_name_is_a_data_error(tmp_path, size):
    seed = bytearray(TARGETS["tar"].seeds()[0])
    seed[124:136], seed[156:157] = size.ljust(12, b"\0"), b"L"  # the size of a long name of GNU tar
    seed[148:156] = b" " * 8
    seed[148:156] = b"%06o\0 " % sum(seed[:512])
    (tmp_path / "a.tar").write_bytes(bytes(seed))
    with pytest.raises(DataError, match="expected a name of at most"):
        ShardSource([tmp_path / "a.tar"])


@pytest.mark.parametrize("cell", [{"bytes": None, "path": b"a.png"}, {"bytes": 5, "path": None}, {"bytes": [1, 2]}])
def test_cell_of_another_type_is_a_bad_image(tmp_path, cell):
    import pyarrow as pa

    with pytest.raises(BadImage, match="row 0: expected an image as bytes or its path as text, got"):
        encoded_cell(pa.scalar(cell), "row 0", str(tmp_path / "a.parquet"))


def test_damaged_label_does_not_fill_the_memory(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    image = {"bytes": TARGETS["image"].seeds()[0], "path": None}
    pq.write_table(pa.table({"image": [image], "label": [2**40]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="expected labels below 1000000"):
        TableSource([tmp_path / "a.parquet"])
    pq.write_table(pa.table({"image": [image], "label": [0]}), tmp_path / "a.parquet")
    source = TableSource([tmp_path / "a.parquet"])
    with pytest.raises(BadImage, match="the row has no image"):
        source.read(1)  # a damaged file can have columns of different lengths


# Recipes


@pytest.mark.parametrize(
    "text",
    [
        "model: {name: 2001-99-99}",
        "[" * 5000,
        "\xff: 1",
        "1: 2",
        "? [a]\n: 1",
        "model: {kwargs: {a: &a [1], b: *a}}",
        "!!python/object/apply:os.system [ls]",
        "data: !!timestamp x",
    ],
    ids=lambda text: text[:30],
)
def test_odd_recipe_is_a_recipe_error(tmp_path, text):
    (tmp_path / "a.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(RecipeError):
        load_recipe(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    "value",
    [
        {"class_path": "pathlib.PurePath"},
        '{"class_path": "pathlib.PurePath"}',
        "class_path: pathlib.PurePath",
        r'{"class\u005fpath": "pathlib.PurePath"}',
        ["a", {"b": r'{"class\u005fpath": "pathlib.PurePath"}'}],
    ],
    ids=str,
)
def test_recipe_cannot_build_a_class(value):
    """jsonargparse builds classes that values name, with any arguments."""
    with pytest.raises(RecipeError, match="expected plain values in a recipe, got class_path"):
        load_recipe({"model": {"kwargs": {"x": value}}})
    with pytest.raises(RecipeError):
        load_recipe({"model": {"name": value}})


def test_tensors_are_not_the_only_safe_content(tmp_path):
    """A checkpoint with training arguments still loads."""
    from argparse import Namespace

    torch.save({"model": Tiny().state_dict(), "args": Namespace(lr=0.1)}, tmp_path / "a.pth")
    assert set(read_state_dict(tmp_path / "a.pth")) == {"fc.weight", "fc.bias"}
