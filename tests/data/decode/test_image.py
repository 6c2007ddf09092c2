"""Whatever wrote a picture, it becomes the RGB a person would see."""

import io
import pickle

import numpy as np
import pytest
from PIL import Image

from saccade.data.decode.image import BadImage, read_image, to_rgb


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def corner(image: Image.Image) -> tuple[int, ...]:
    return image.getpixel((0, 0))  # type: ignore[return-value]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation):
    """Eight ways a camera can be held: the red corner of the stored picture goes where the tag says."""
    stored = np.zeros((4, 6, 3), np.uint8)
    stored[0, 0] = (255, 0, 0)
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = np.asarray(read_image(encoded(Image.fromarray(stored), "PNG", exif=exif)))
    upright = {1: stored, 2: stored[:, ::-1], 3: stored[::-1, ::-1], 4: stored[::-1]}
    swapped = stored.transpose(1, 0, 2)
    upright |= {5: swapped, 6: swapped[:, ::-1], 7: swapped[::-1, ::-1], 8: swapped[::-1]}
    np.testing.assert_array_equal(found, upright[orientation])


def test_grey_pictures_of_any_depth_are_scaled_not_clipped():
    grey = read_image(encoded(Image.new("L", (2, 2), 100), "PNG"))
    assert corner(grey) == (100, 100, 100)
    one_bit = read_image(encoded(Image.new("1", (2, 2), 1), "PNG"))
    assert corner(one_bit) == (255, 255, 255)
    deep = np.array([[0, 257, 32896, 65535]], np.uint16)
    found = np.asarray(read_image(encoded(Image.fromarray(deep), "PNG")))[0, :, 0]
    np.testing.assert_array_equal(found, [0, 1, 128, 255])
    wide = Image.fromarray(np.array([[0, 65535]], np.int32), mode="I")
    np.testing.assert_array_equal(np.asarray(to_rgb(wide))[0, :, 0], [0, 255])


@pytest.mark.parametrize(("top", "expected"), [(1.0, 255), (255.0, 255), (65535.0, 255)])
def test_float_pictures_are_scaled_by_their_range(top, expected):
    values = Image.fromarray(np.array([[0, top / 2, top]], np.float32))
    np.testing.assert_allclose(np.asarray(to_rgb(values))[0, :, 0], [0, expected / 2, expected], atol=1)


def test_transparency_is_laid_on_white():
    half = Image.new("RGBA", (2, 2), (255, 0, 0, 128))
    assert corner(read_image(encoded(half, "PNG"))) == (255, 127, 127)
    hidden = Image.new("RGBA", (2, 2), (0, 0, 0, 0))  # black under full transparency is white to the eye
    assert corner(read_image(encoded(hidden, "PNG"))) == (255, 255, 255)
    assert corner(read_image(encoded(Image.new("LA", (2, 2), (0, 0)), "PNG"))) == (255, 255, 255)


def test_palettes_keep_their_colours_and_their_transparent_entry():
    picture = Image.new("P", (2, 1))
    picture.putpalette([10, 200, 30, 1, 2, 3])
    picture.putpixel((1, 0), 1)
    found = read_image(encoded(picture, "PNG", transparency=1))
    assert [found.getpixel((x, 0)) for x in (0, 1)] == [(10, 200, 30), (255, 255, 255)]


def test_cmyk_is_not_inverted():
    for ink, expected in (
        ((255, 0, 0, 0), (0, 255, 255)),
        ((0, 0, 0, 255), (0, 0, 0)),
        ((0, 0, 0, 0), (255, 255, 255)),
    ):
        found = corner(read_image(encoded(Image.new("CMYK", (8, 8), ink), "JPEG", quality=100)))
        np.testing.assert_allclose(found, expected, atol=3)


def test_a_damaged_file_is_named(tmp_path):
    whole = encoded(Image.effect_noise((64, 64), 80).convert("RGB"), "JPEG")
    for name, data in {"cut.jpg": whole[: len(whole) // 2], "empty.png": b"", "text.gif": b"not a picture"}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(BadImage, match=name):
            read_image(tmp_path / name)


def test_a_picture_of_absurd_size_is_bad_not_fatal(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(BadImage, match="decompression bomb"):
        read_image(encoded(Image.new("RGB", (8, 8)), "PNG"), "bomb.png")


def test_the_error_travels_between_processes():
    error = pickle.loads(pickle.dumps(BadImage("a.jpg", "truncated")))
    assert (str(error), error.name) == ("a.jpg: truncated", "a.jpg")
