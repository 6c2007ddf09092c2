"""Pictures in: whatever a person throws at it."""

import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from saccade.explain.images import MAX_PIXELS, as_list, frame, load_picture, load_view, unique_names
from tests.peak_memory import PEAK


def huge_png(width: int, height: int) -> bytes:
    """A PNG of one grey value: small as a file, large once decoded."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer = zlib.compressobj(1)
    rows = b"".join(packer.compress(bytes(width * 3 + 1)) for _ in range(height)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_a_missing_file_a_folder_and_a_text_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"no such image: .*nothing\.jpg"):
        load_picture(tmp_path / "nothing.jpg")
    with pytest.raises(ValueError, match=r"is a folder; name the images in it"):
        load_picture(tmp_path)
    (tmp_path / "text.jpg").write_text("not a picture")
    with pytest.raises(ValueError, match=r"text\.jpg is not an image that Pillow can read"):
        load_picture(tmp_path / "text.jpg")
    (tmp_path / "empty.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"empty\.png is not an image"):
        load_picture(tmp_path / "empty.png")


@pytest.mark.parametrize("kind", ["jpg", "png"])
def test_half_a_file_is_named(tmp_path, kind):
    path = tmp_path / f"half.{kind}"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match="is damaged or incomplete"):
        load_picture(path)


def test_one_pixel_is_a_picture(tmp_path):
    Image.new("RGB", (1, 1), (10, 200, 30)).save(tmp_path / "one.png")
    view = load_view(tmp_path / "one.png", 64)
    assert view.image.shape == (3, 64, 64)
    assert (view.picture == [10, 200, 30]).all()
    assert torch.equal(view.image, view.image[:, :1, :1].expand(-1, 64, 64))


@pytest.mark.parametrize("shape", [(1, 900), (900, 1), (3, 2000)])
def test_a_strip_is_cut_to_four_to_one(shape):
    view = load_view(np.zeros((*shape, 3), np.uint8), 64)
    assert max(view.image.shape[1:]) / min(view.image.shape[1:]) == 4
    assert view.image[0].numel() == 64 * 64


def promising(path, width: int, height: int):
    """A small file whose header promises a large picture."""
    data = bytearray(huge_png(10, 10))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    path.write_bytes(data)
    return path


def test_a_bomb_is_refused_before_it_is_decoded(tmp_path):
    with pytest.raises(ValueError, match=r"has 144 megapixels, the limit is 120\. Reduce it first"):
        load_picture(promising(tmp_path / "bomb.png", 12000, 12000))
    with pytest.raises(ValueError, match="would fill the memory"):
        load_picture(promising(tmp_path / "atom_bomb.png", 100000, 100000))
    assert MAX_PIXELS == 120_000_000


MEASURE = (
    PEAK
    + """
import sys
import saccade
from saccade.explain.images import load_view
for path in sys.argv[1:]:
    before = peak()
    view = load_view(path, 224)
    print(*view.image.shape, (peak() - before) // 1024)
"""
)


def test_a_hundred_megapixels_in_bounded_memory(tmp_path):
    """Megabytes beyond the import: a JPEG is reduced while it is decoded, a PNG right after."""
    Image.new("L", (10000, 10000), 100).save(tmp_path / "large.jpg", quality=30)
    (tmp_path / "large.png").write_bytes(huge_png(10000, 10000))
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "large.jpg"), str(tmp_path / "large.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    jpeg, png = ([int(word) for word in line.split()] for line in done.stdout.splitlines())
    assert jpeg[:3] == png[:3] == [3, 224, 224]
    assert jpeg[3] < 130
    assert png[3] < 520


def test_all_modes_become_the_same_rgb(tmp_path):
    grey = np.tile(np.arange(0, 256, 4, dtype=np.uint8), (8, 1))
    cases = {
        "l.png": Image.fromarray(grey),
        "sixteen.png": Image.fromarray(grey.astype(np.uint16) * 257),
        "rgba.png": Image.fromarray(np.dstack([grey, grey, grey, np.full_like(grey, 255)])),
        "palette.png": Image.fromarray(grey).convert("P"),
        "la.png": Image.fromarray(grey).convert("LA"),
    }
    for name, picture in cases.items():
        picture.save(tmp_path / name)
        found = np.array(load_picture(tmp_path / name)).astype(int)
        assert found.shape == (8, 64, 3), name
        assert np.abs(found - grey[..., None]).max() <= 1, name
    Image.fromarray(np.dstack([grey] * 3 + [np.zeros_like(grey)])).save(tmp_path / "clear.png")
    assert (np.array(load_picture(tmp_path / "clear.png")) == 255).all()  # transparent is white


def test_a_turned_photograph_is_upright(tmp_path):
    picture = Image.new("RGB", (40, 20))
    picture.paste((255, 0, 0), (0, 0, 10, 20))
    exif = picture.getexif()
    exif[0x0112] = 6  # the camera was turned
    picture.save(tmp_path / "turned.jpg", exif=exif, quality=95)
    found = np.array(load_picture(tmp_path / "turned.jpg")).astype(int)
    assert found.shape == (40, 20, 3)
    assert found[2, 10, 0] > 200
    assert found[30, 10, 0] < 60


def test_arrays_and_tensors():
    image = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    tensor = torch.from_numpy(image).permute(2, 0, 1).float() / 255
    for source in (image, image / 255, tensor, tensor.half(), torch.from_numpy(image)):
        found = np.array(load_picture(source)).astype(int)
        assert np.abs(found - image).max() <= 1
    assert np.array(load_picture(image[..., 0])).shape == (20, 30, 3)
    with pytest.raises(ValueError, match="before normalisation"):
        load_picture(tensor * 4 - 2)
    with pytest.raises(ValueError, match=r"expected an image \(H, W\)"):
        load_picture(np.zeros((4, 5, 7)))
    with pytest.raises(ValueError, match="got int"):
        load_picture(5)


def test_one_or_many():
    batch = torch.zeros(3, 3, 8, 8)
    assert len(as_list(batch)) == 3
    assert len(as_list(batch[0])) == 1
    assert as_list("a.jpg") == ["a.jpg"]
    assert as_list(iter(["a.jpg", "b.jpg"])) == ["a.jpg", "b.jpg"]
    assert unique_names(["x/cat.jpg", "y/cat.jpg", batch[0], "cat.png"]) == [
        "cat.jpg",
        "cat-2.jpg",
        "image",
        "cat-3.png",
    ]


@pytest.mark.parametrize(
    ("height", "width", "size", "expected"),
    [(300, 451, 224, (192, 288)), (512, 512, 224, (224, 224)), (600, 400, 64, (80, 48)), (7, 7, 64, (64, 64))],
)
def test_the_frame_has_the_models_area_and_the_pictures_aspect(height, width, size, expected):
    assert frame(height, width, size) == expected
