"""Image input."""

import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from saccade.data.decode.image import MAX_PIXELS
from saccade.data.decode.inputs import list_inputs, read_input
from saccade.data.transforms.batch import normalize
from saccade.explanation.images import input_size, load_view, unique_names
from tests.peak_memory import PEAK


def huge_png(width: int, height: int) -> bytes:
    """A PNG of one grey value: small as a file, large once decoded."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer = zlib.compressobj(1)
    rows = b"".join(packer.compress(bytes(width * 3 + 1)) for _ in range(height)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.jpg: no such file"):
        read_input(tmp_path / "nothing.jpg")
    with pytest.raises(ValueError, match=r"expected an image file, got a folder\. Name the images in it"):
        read_input(tmp_path)
    (tmp_path / "text.jpg").write_text("not an image")
    with pytest.raises(ValueError, match=r"text\.jpg: not a readable image\. Expected one of JPEG, PNG"):
        read_input(tmp_path / "text.jpg")
    (tmp_path / "empty.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"empty\.png: the file is empty"):
        read_input(tmp_path / "empty.png")


@pytest.mark.parametrize("kind", ["jpg", "png"])
def test_truncated_files_are_refused(tmp_path, kind):
    path = tmp_path / f"half.{kind}"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=rf"half\.{kind}: (image file is truncated|unrecognized data stream|broken)"):
        read_input(path)


def test_one_pixel_is_an_image(tmp_path):
    Image.new("RGB", (1, 1), (10, 200, 30)).save(tmp_path / "one.png")
    view = load_view(tmp_path / "one.png", 64)
    assert view.image.shape == (3, 64, 64)
    assert (view.canvas == [10, 200, 30]).all()
    assert torch.equal(view.image, view.image[:, :1, :1].expand(-1, 64, 64))


@pytest.mark.parametrize("shape", [(1, 900), (900, 1), (3, 2000)])
def test_long_images_are_cropped_to_four_to_one(shape):
    view = load_view(np.zeros((*shape, 3), np.uint8), 64)
    assert max(view.image.shape[1:]) / min(view.image.shape[1:]) == 4
    assert view.image[0].numel() == 64 * 64


def with_header(path, width: int, height: int):
    """A small file whose header declares a large image."""
    data = bytearray(huge_png(10, 10))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    path.write_bytes(data)
    return path


def test_decompression_bombs_are_refused_before_decoding(tmp_path):
    with pytest.raises(ValueError, match=r"bomb\.png: expected at most 120 megapixels, got 144\. Downscale"):
        read_input(with_header(tmp_path / "bomb.png", 12000, 12000))
    with pytest.raises(ValueError, match=r"atom_bomb\.png: Image size \(10000000000 pixels\) exceeds limit"):
        read_input(with_header(tmp_path / "atom_bomb.png", 100000, 100000))
    assert MAX_PIXELS == 120_000_000


MEASURE = (
    PEAK
    + """
import sys
import saccade
from saccade.data.transforms.batch import normalize
from saccade.explanation.images import load_view
for path in sys.argv[1:]:
    before = peak()
    view = load_view(path, 224)
    print(*view.image.shape, (peak() - before) // 1024)
"""
)


def test_large_files_are_decoded_in_bounded_memory(tmp_path):
    """Megabytes beyond the import: a JPEG is downscaled while decoding, a PNG right after."""
    Image.new("L", (10000, 10000), 100).save(tmp_path / "large.jpg", quality=30)
    (tmp_path / "large.png").write_bytes(huge_png(10000, 10000))
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "large.jpg"), str(tmp_path / "large.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    jpeg, png = ([int(word) for word in line.split()] for line in done.stdout.splitlines())
    assert jpeg[:3] == png[:3] == [3, 224, 224]
    assert jpeg[3] < 130
    assert png[3] < 520


def test_every_mode_becomes_rgb(tmp_path):
    grey = np.tile(np.arange(0, 256, 4, dtype=np.uint8), (8, 1))
    cases = {
        "l.png": Image.fromarray(grey),
        "sixteen.png": Image.fromarray(grey.astype(np.uint16) * 257),
        "rgba.png": Image.fromarray(np.dstack([grey, grey, grey, np.full_like(grey, 255)])),
        "palette.png": Image.fromarray(grey).convert("P"),
        "la.png": Image.fromarray(grey).convert("LA"),
    }
    for name, image in cases.items():
        image.save(tmp_path / name)
        pixels = np.array(read_input(tmp_path / name)).astype(int)
        assert pixels.shape == (8, 64, 3), name
        assert np.abs(pixels - grey[..., None]).max() <= 1, name
    Image.fromarray(np.dstack([grey] * 3 + [np.zeros_like(grey)])).save(tmp_path / "clear.png")
    assert (np.array(read_input(tmp_path / "clear.png")) == 255).all()  # transparent is white


def test_exif_orientation_is_applied(tmp_path):
    image = Image.new("RGB", (40, 20))
    image.paste((255, 0, 0), (0, 0, 10, 20))
    exif = image.getexif()
    exif[0x0112] = 6  # rotated by 90 degrees
    image.save(tmp_path / "rotated.jpg", exif=exif, quality=95)
    pixels = np.array(read_input(tmp_path / "rotated.jpg")).astype(int)
    assert pixels.shape == (40, 20, 3)
    assert pixels[2, 10, 0] > 200
    assert pixels[30, 10, 0] < 60


def test_arrays_and_tensors_are_converted():
    image = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    tensor = torch.from_numpy(image).permute(2, 0, 1).float() / 255
    for source in (image, image / 255, tensor, tensor.half(), torch.from_numpy(image)):
        pixels = np.array(read_input(source)).astype(int)
        assert np.abs(pixels - image).max() <= 1
    assert np.array(read_input(image[..., 0])).shape == (20, 30, 3)


def test_other_arrays_are_refused():
    tensor = torch.rand(3, 20, 30)
    with pytest.raises(ValueError, match="before normalisation"):
        read_input(tensor * 4 - 2)
    with pytest.raises(ValueError, match=r"expected an image \(H, W\)"):
        read_input(np.zeros((4, 5, 7)))
    with pytest.raises(ValueError, match="got int"):
        read_input(5)


def test_list_inputs_splits_batches_only():
    batch = torch.zeros(3, 3, 8, 8)
    assert len(list_inputs(batch)) == 3
    assert len(list_inputs(batch[0])) == 1
    assert list_inputs("a.jpg") == ["a.jpg"]
    assert list_inputs(iter(["a.jpg", "b.jpg"])) == ["a.jpg", "b.jpg"]


def test_names_have_unique_stems():
    batch = torch.zeros(1, 3, 8, 8)
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
def test_input_size_has_the_area_of_the_model_and_the_aspect_of_the_image(height, width, size, expected):
    assert input_size(height, width, size) == expected


def test_view_and_canvas_have_the_same_field_of_view():
    """A bright pixel lies at the same relative position in both."""
    for width, height in [(200, 100), (97, 131), (64, 64), (31, 300)]:
        image = Image.new("RGB", (width, height))
        image.putpixel((width * 3 // 10, height * 6 // 10), (255, 255, 255))
        view = load_view(image, 64)
        arrays = view.image.sum(0), torch.from_numpy(view.canvas.astype("float32")).sum(2)
        peaks = [divmod(int(values.argmax()), values.shape[1]) for values in arrays]
        for axis in (0, 1):
            first, second = ((peaks[i][axis] + 0.5) / arrays[i].shape[axis] for i in (0, 1))
            assert abs(first - second) <= 0.75 / arrays[0].shape[axis]


def test_images_and_clips_are_normalised_per_channel():
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 2.0)
    for shape in [(2, 3, 4, 5), (2, 3, 6, 4, 5)]:
        images = torch.rand(shape)
        normalised = normalize(images, mean, std)
        for channel in range(3):
            expected = (images[:, channel] - mean[channel]) / std[channel]
            torch.testing.assert_close(normalised[:, channel], expected)
    images = torch.rand(2, 3, 4, 5)
    torch.testing.assert_close(normalize(images, (0.5,), (0.2,)), (images.mean(1, keepdim=True) - 0.5) / 0.2)


def test_view_of_a_detector_has_its_shorter_side():
    image = np.zeros((100, 200, 3), np.uint8)
    assert load_view(image, 64, longest=640).image.shape == (3, 64, 128)
    assert load_view(image, 64, longest=64).image.shape == (3, 32, 64)
    assert load_view(image, 64).image.shape == (3, 48, 96)
