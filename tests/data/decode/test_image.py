"""Decoding to RGB: orientation, bit depth, transparency, colour spaces, allowed formats and damaged files."""

import io
import pickle

import numpy as np
import pytest
from PIL import Image, ImageCms

from saccade.data.decode.image import FORMATS, IMAGE_SUFFIXES, BadImage, read_image, read_mask_values, to_rgb
from tests.data.mask_files import save


def encode(image: Image.Image, format: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def corner(image: Image.Image) -> tuple[int, ...]:
    return image.getpixel((0, 0))  # type: ignore[return-value]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation):
    """All eight EXIF orientations, followed by the position of one red corner pixel."""
    stored = np.zeros((4, 6, 3), np.uint8)
    stored[0, 0] = (255, 0, 0)
    exif = Image.Exif()
    exif[0x0112] = orientation
    rgb = np.asarray(read_image(encode(Image.fromarray(stored), "PNG", exif=exif)))
    expected = {1: stored, 2: stored[:, ::-1], 3: stored[::-1, ::-1], 4: stored[::-1]}
    transposed = stored.transpose(1, 0, 2)
    expected |= {5: transposed, 6: transposed[:, ::-1], 7: transposed[::-1, ::-1], 8: transposed[::-1]}
    np.testing.assert_array_equal(rgb, expected[orientation])


def test_grey_values_are_scaled_from_any_bit_depth():
    grey = read_image(encode(Image.new("L", (2, 2), 100), "PNG"))
    assert corner(grey) == (100, 100, 100)
    one_bit = read_image(encode(Image.new("1", (2, 2), 1), "PNG"))
    assert corner(one_bit) == (255, 255, 255)
    deep = np.array([[0, 257, 32896, 65535]], np.uint16)
    rgb = np.asarray(read_image(encode(Image.fromarray(deep), "PNG")))[0, :, 0]
    np.testing.assert_array_equal(rgb, [0, 1, 128, 255])
    wide = Image.fromarray(np.array([[0, 65535]], np.int32), mode="I")
    np.testing.assert_array_equal(np.asarray(to_rgb(wide))[0, :, 0], [0, 255])


@pytest.mark.parametrize(("maximum", "white"), [(1.0, 255), (255.0, 255), (65535.0, 255)])
def test_float_images_are_scaled_by_their_range(maximum, white):
    values = Image.fromarray(np.array([[0, maximum / 2, maximum]], np.float32))
    np.testing.assert_allclose(np.asarray(to_rgb(values))[0, :, 0], [0, white / 2, white], atol=1)


def test_transparency_is_composited_on_white():
    half = Image.new("RGBA", (2, 2), (255, 0, 0, 128))
    assert corner(read_image(encode(half, "PNG"))) == (255, 127, 127)
    hidden = Image.new("RGBA", (2, 2), (0, 0, 0, 0))
    assert corner(read_image(encode(hidden, "PNG"))) == (255, 255, 255)
    assert corner(read_image(encode(Image.new("LA", (2, 2), (0, 0)), "PNG"))) == (255, 255, 255)


def test_palette_colours_and_transparent_entry_are_applied():
    image = Image.new("P", (2, 1))
    image.putpalette([10, 200, 30, 1, 2, 3])
    image.putpixel((1, 0), 1)
    rgb = read_image(encode(image, "PNG", transparency=1))
    assert [rgb.getpixel((x, 0)) for x in (0, 1)] == [(10, 200, 30), (255, 255, 255)]


def test_cmyk_is_not_inverted():
    for ink, expected in (
        ((255, 0, 0, 0), (0, 255, 255)),
        ((0, 0, 0, 255), (0, 0, 0)),
        ((0, 0, 0, 0), (255, 255, 255)),
    ):
        rgb = corner(read_image(encode(Image.new("CMYK", (8, 8), ink), "JPEG", quality=100)))
        np.testing.assert_allclose(rgb, expected, atol=3)


def test_cmyk_with_a_damaged_profile_is_converted_without_it():
    image = Image.new("CMYK", (2, 2), (0, 200, 200, 0))
    expected = corner(to_rgb(image.copy()))
    image.info["icc_profile"] = b"not a profile"
    assert corner(to_rgb(image)) == expected


def test_lab_is_converted_to_the_colours_it_encodes():
    profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    red = Image.new("RGB", (2, 2), (200, 30, 40))
    lab = ImageCms.profileToProfile(red, *profiles, outputMode="LAB")
    assert np.allclose(corner(to_rgb(lab)), (200, 30, 40), atol=4)


@pytest.mark.parametrize(
    ("value", "message"), [(np.nan, "finite"), (-1.0, "not negative"), (70000.0, "at most 16 bits, got 70000")]
)
def test_grey_values_without_a_scale_are_refused(value, message):
    with pytest.raises(ValueError, match=message):
        to_rgb(Image.fromarray(np.full((2, 2), value, np.float32)))


def test_large_image_in_a_few_bytes_is_refused_from_bytes_and_files():
    encoded = encode(Image.new("1", (6000, 6000)), "TIFF", compression="group4")
    assert len(encoded) < 10_000
    for source in (encoded, io.BytesIO(encoded)):
        with pytest.raises(BadImage, match="36 megapixels"):
            read_image(source)


def test_damaged_file_raises_with_its_name(tmp_path):
    content = encode(Image.effect_noise((64, 64), 80).convert("RGB"), "JPEG")
    for name, data in {"cut.jpg": content[: len(content) // 2], "empty.png": b"", "text.gif": b"not an image"}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(BadImage, match=name):
            read_image(tmp_path / name)


ODD_FILES = {
    "truncated.jpg": "image file is truncated",
    "empty.jpg": "the file is empty|not a readable image",
    "text.jpg": "not a readable image",
    "header.jpg": "not a readable image|broken|truncated",
    "huge.png": "expected at most 120 megapixels, got 900 megapixels|decompression bomb",
    "cut.png": "truncated|broken|unrecognized data stream",
    "cmyk.jpg": None,
    "animated.gif": None,
    "deep.png": None,
    "lossless.webp": None,
}


@pytest.fixture(scope="module")
def odd_files(tmp_path_factory):
    """A folder with the files above."""
    root, noise = tmp_path_factory.mktemp("odd"), Image.effect_noise((64, 64), 80)
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    content = {
        "truncated.jpg": encode(noise.convert("RGB"), "JPEG")[:900],
        "empty.jpg": b"",
        "text.jpg": b"hello, this is not an image",
        "header.jpg": b"\xff\xd8\xff\xe0",
        "huge.png": encode(Image.new("1", (30000, 30000)), "PNG"),
        "cut.png": encode(noise, "PNG")[:-600],
        "cmyk.jpg": encode(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=100),
        "animated.gif": encode(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "deep.png": encode(Image.fromarray(np.full((16, 16), 65535, np.uint16)), "PNG"),
        "lossless.webp": encode(frames[0], "WEBP", lossless=True),
    }
    for name, data in content.items():
        (root / name).write_bytes(data)
    return root


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize("name", ODD_FILES)
@pytest.mark.filterwarnings("error")
def test_odd_files_give_an_image_or_one_line(odd_files, name, as_bytes):
    source = (odd_files / name).read_bytes() if as_bytes else odd_files / name
    if ODD_FILES[name] is not None:
        with pytest.raises(BadImage, match=ODD_FILES[name]) as error:
            read_image(source, name)
        assert str(error.value).startswith(f"{name}: ")
        assert "\n" not in str(error.value)
        return
    image = read_image(source, name)
    assert (image.mode, image.size) == ("RGB", (16, 16))
    expected = (255, 255, 255) if name == "deep.png" else (255, 0, 0)
    np.testing.assert_allclose(corner(image), expected, atol=3)


def test_url_is_read_over_http(serve_folder, odd_files):
    with serve_folder(odd_files) as address:
        assert corner(read_image(f"{address}/lossless.webp")) == (255, 0, 0)
        with pytest.raises(BadImage, match=f"{address}/absent.jpg: "):
            read_image(f"{address}/absent.jpg")
        with pytest.raises(BadImage, match="not a readable image"):
            read_image(f"{address}/text.jpg")


def test_decompression_bomb_raises_bad_image(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(BadImage, match="decompression bomb"):
        read_image(encode(Image.new("RGB", (8, 8)), "PNG"), "bomb.png")


def test_bad_image_survives_pickling():
    error = pickle.loads(pickle.dumps(BadImage("a.jpg", "truncated")))
    assert (str(error), error.name) == ("a.jpg: truncated", "a.jpg")


# A PSD header (2 x 2 px, RGB, raw): Pillow opens it, the allow-list refuses it.
PSD = (
    b"8BPS\x00\x01" + bytes(6) + (3).to_bytes(2, "big") + (2).to_bytes(4, "big") * 2 + (8).to_bytes(2, "big")
    + (3).to_bytes(2, "big") + bytes(12) + bytes(2) + bytes(12)
)  # fmt: skip


@pytest.mark.parametrize("read", [read_image, read_mask_values])
@pytest.mark.parametrize("format", ["PSD", "EPS", "TGA", "ICO"])
def test_formats_outside_the_allow_list_are_refused_in_one_line(read, format):
    data = PSD if format == "PSD" else encode(Image.new("RGB", (16, 16)), format)
    with Image.open(io.BytesIO(data)) as image:
        assert image.format == format, "Pillow would open it"
    with pytest.raises(BadImage) as error:
        read(data, "file.jpg")
    assert str(error.value) == f"file.jpg: not a readable image. Expected one of {', '.join(FORMATS)}"


def test_every_suffix_belongs_to_an_allowed_format():
    Image.init()
    assert {Image.EXTENSION[suffix] for suffix in IMAGE_SUFFIXES} == set(FORMATS)


@pytest.mark.parametrize("mode", [None, "P", "I;16"])
def test_mask_values_are_read_from_palette_8_bit_and_16_bit_files(tmp_path, mode):
    values = np.array([[0, 1, 2], [3, 255, 0]])
    save(tmp_path / "mask.png", values, mode)
    np.testing.assert_array_equal(read_mask_values(tmp_path / "mask.png", "mask"), values)


def test_mask_values_are_read_from_grey_stored_as_rgb(tmp_path):
    values = np.array([[0, 1, 2], [3, 255, 0]])
    save(tmp_path / "grey.png", np.repeat(values[..., None], 3, 2))
    np.testing.assert_array_equal(read_mask_values(tmp_path / "grey.png", "mask"), values)


def test_colour_masks_raise(tmp_path):
    save(tmp_path / "colour.png", np.random.default_rng(0).integers(256, size=(4, 4, 3)))
    with pytest.raises(BadImage, match=r"colour: expected a mask with one channel of class indices, got .*mode RGB"):
        read_mask_values(tmp_path / "colour.png", "colour")
