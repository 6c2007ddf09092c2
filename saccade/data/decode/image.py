"""Encoded image -> 8-bit RGB, and encoded mask -> integers, for every file type that datasets use."""

import io
import os
import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError

from saccade._extras import printable
from saccade.data.decode.urls import is_url, read_bytes

IMAGE_SUFFIXES = {
    ".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".jp2", ".avif",
}  # fmt: skip
# Pillow's other parsers (PSD, EPS, FITS, ...) are larger, less tested, and must not run on untrusted files.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF")
MAX_PIXELS = 120_000_000  # about half a gigabyte once decoded; larger files are refused before decoding
# Decoders that need 8 to 24 bytes per pixel besides the image, and write large images from a few bytes.
MAX_PIXELS_OF = {"WEBP": 60_000_000, "AVIF": 60_000_000, "JPEG2000": 30_000_000}
MAX_SIDE = 250_000  # pixels
MAX_PIXELS_PER_BYTE = 20_000  # of a large image; an empty 1-bit PNG has 8000
BAND = 4_000_000  # pixels that are converted at a time
_OPENING = Lock()
# Raised by Pillow for empty, truncated, oversized or unidentified files.
DECODE_ERRORS = (OSError, SyntaxError, ValueError, EOFError, IndexError, Image.DecompressionBombError)


class BadImage(ValueError):
    """An image that cannot be read. The message is `name: reason`."""

    def __init__(self, name: str, reason: object):
        self.name, self.reason = printable(name), printable(str(reason))
        super().__init__(f"{self.name}: {self.reason}")

    def __reduce__(self):  # pickled by DataLoader workers
        return type(self), (self.name, self.reason)


def read_image(source: str | Path | bytes | Any, name: str | None = None, max_side: int | None = None) -> Image.Image:
    """Decode a path, URL, bytes or an open binary file to RGB; raises `BadImage`, which carries `name`.

    Of an animation, the first frame. With `max_side`, larger images are downscaled; JPEG files already while decoding,
    which bounds memory.
    """
    name = name or (str(source) if isinstance(source, (str, Path)) else "image")
    convert = partial(to_rgb, in_place=True) if max_side is None else partial(_downscaled_rgb, max_side=max_side)
    return _decode(source, name, convert, max_side)


def read_mask_values(source: str | Path | bytes | Any, name: str, colours: bool = False) -> np.ndarray:
    """Integers (H, W) int64 of a palette, 8-bit or 16-bit grey file, whose palette is ignored.

    With `colours`, the RGB colour of every pixel instead: 0xrrggbb.
    """
    values, mode, file_format = _decode(
        source, name, lambda image: (np.array(image.convert("RGB") if colours else image), image.mode, image.format)
    )
    if file_format == "JPEG":
        raise BadImage(name, "expected a mask in a lossless format, got JPEG, which changes values. Save it as PNG")
    if colours:
        return values.astype(np.int64) @ np.array([1 << 16, 1 << 8, 1])
    if values.ndim == 3 and values.shape[2] >= 3 and (values[..., :3] == values[..., :1]).all():
        values = values[..., 0]  # grey stored as RGB
    if values.ndim != 2 or values.dtype.kind not in "uib":
        raise BadImage(
            name,
            f"expected a mask with one channel of class indices, got a colour image (mode {mode}). "
            "List the colour of every class, as in data.mask_values=['#000000', '#ff0000']",
        )
    return values.astype(np.int64)


def _decode(source: Any, name: str, convert: Any, max_side: int | None = None) -> Any:
    """`convert` of the loaded Pillow image. Every file that saccade decodes is opened here."""
    try:
        if isinstance(source, (str, Path)) and not is_url(str(source)) and Path(source).exists():
            if Path(source).is_dir():
                raise BadImage(name, "expected an image file, got a folder. Name the images in it")
            if not Path(source).is_file():  # reading a device or a pipe may never end
                raise BadImage(name, "expected an image file, got a device or a pipe")
        if isinstance(source, str) and is_url(source):
            source = read_bytes(source)
        if isinstance(source, bytes) and not source:
            raise BadImage(name, "the file is empty")
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        with _open(file) as image:
            _check_pixels(image.width * image.height, MAX_PIXELS_OF.get(image.format or "", MAX_PIXELS))
            _check_content(image, _size_of(source))
            if max_side is not None:
                image.draft("RGB", (max_side, max_side))  # JPEG only: decode at 1/2, 1/4 or 1/8
            image.load()
            return convert(image)
    except BadImage:
        raise
    except FileNotFoundError as error:
        raise BadImage(name, "no such file") from error
    except UnidentifiedImageError as error:
        if isinstance(source, (str, Path)) and not os.path.getsize(source):
            raise BadImage(name, "the file is empty") from error
        raise BadImage(name, f"not a readable image. Expected one of {', '.join(FORMATS)}") from error
    except Exception as error:  # Pillow raises many types for damaged files: struct.error, zlib.error, KeyError, ...
        raise BadImage(name, " ".join(str(error).split()) or type(error).__name__) from error


def _open(file: Any) -> Image.Image:
    """Read the header of a file. The lock is for `catch_warnings`, which changes the filters of all threads."""
    with _OPENING, warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # MAX_PIXELS is the limit here
        return Image.open(file, formats=supported_formats())


def _check_pixels(pixels: int, limit: int) -> None:
    if pixels > limit:
        raise ValueError(
            f"expected at most {limit / 1e6:.0f} megapixels, got {pixels / 1e6:.0f}. "
            "Downscale it first, for example with Image.thumbnail"
        )


def _check_content(image: Image.Image, size: int) -> None:
    """Refuse a large image in a few bytes, or with a side that no camera has: decoding a damaged header takes long."""
    pixels = image.width * image.height
    if max(image.size) > MAX_SIDE:
        raise ValueError(f"expected sides of at most {MAX_SIDE} px, got {image.width} x {image.height}")
    if pixels > 16_000_000 and pixels > MAX_PIXELS_PER_BYTE * size:
        raise ValueError(f"expected the content of {pixels / 1e6:.0f} megapixels, got {size} bytes: a damaged file")


def _size_of(source: Any) -> int:
    """Bytes of an encoded image."""
    if isinstance(source, bytes):
        return len(source)
    if isinstance(source, (str, Path)):
        return Path(source).stat().st_size
    position = source.tell()
    size = source.seek(0, io.SEEK_END)
    source.seek(position)
    return size


def _downscaled_rgb(image: Image.Image, max_side: int) -> Image.Image:
    """Downscale before the conversion to RGB, which would copy the large image."""
    if image.mode in ("RGB", "L", "RGBA", "CMYK", "YCbCr"):  # palettes and 16-bit modes cannot be interpolated
        image.thumbnail((max_side, max_side), Image.Resampling.BICUBIC, reducing_gap=2.0)
    image = to_rgb(image, in_place=True)
    image.thumbnail((max_side, max_side), Image.Resampling.BICUBIC)
    return image


@lru_cache(maxsize=1)
def supported_formats() -> tuple[str, ...]:
    """FORMATS that the installed Pillow can open; AVIF needs Pillow 11.3."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def to_rgb(image: Image.Image, in_place: bool = False) -> Image.Image:
    """Apply EXIF orientation, composite transparency on white, scale 16-bit values, convert CMYK by its profile.

    With `in_place`, the argument itself is rotated, which saves a copy of a large image.
    """
    image = _upright(image, in_place)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "CMYK":
        return _cmyk_to_rgb(image)
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        return _grey_to_rgb(image)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        return _by_bands(image, _on_white)
    return image.convert("RGB")


def _upright(image: Image.Image, in_place: bool) -> Image.Image:
    """The image in its EXIF orientation; damaged EXIF data has none."""
    try:
        if in_place:
            ImageOps.exif_transpose(image, in_place=True)
            return image
        return ImageOps.exif_transpose(image)
    except Exception:  # SyntaxError, struct.error, ... for damaged tags
        return image


def _by_bands(image: Image.Image, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """`convert`, applied to a few rows at a time: its intermediate copies of a large image would fill the memory."""
    rows = max(1, BAND // max(1, image.width))
    if image.height <= rows:
        return convert(image)
    result = Image.new("RGB", image.size)
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(top + rows, image.height)))
        band.info = dict(image.info)  # holds the transparent colour
        result.paste(convert(band), (0, top))
    return result


def _on_white(image: Image.Image) -> Image.Image:
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")


def _grey_to_rgb(image: Image.Image) -> Image.Image:
    """16-bit, 32-bit and float grey, scaled to 8 bits by the range of the values instead of clipped at 255."""
    values = np.asarray(image)
    minimum, maximum = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    if not (np.isfinite(minimum) and np.isfinite(maximum)) or minimum < 0:  # NaN is the minimum and maximum if any is
        raise ValueError("grey values must be finite and not negative")
    if image.mode.startswith("I"):
        white = 65535  # Pillow opens 16-bit files as "I" or "I;16"
    else:
        white = 1 if maximum <= 1 else 255 if maximum <= 255 else 65535
    if maximum > white:
        raise ValueError(f"expected grey values of at most 16 bits, got {maximum:g}. Convert the file first")
    del values
    return _by_bands(image, partial(_scaled_grey, white=white))


def _scaled_grey(image: Image.Image, white: int) -> Image.Image:
    values = np.asarray(image, dtype=np.float64)
    return Image.fromarray((values * (255 / white) + 0.5).astype(np.uint8)).convert("RGB")


def _cmyk_to_rgb(image: Image.Image) -> Image.Image:
    profile = image.info.get("icc_profile")
    if profile:
        try:
            source, target = ImageCms.ImageCmsProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB")
            converted = ImageCms.profileToProfile(image, source, target, outputMode="RGB")
            assert converted is not None  # None only for in-place conversion
            return converted
        except (ImageCms.PyCMSError, OSError):
            pass  # invalid profile: fall back to Pillow's formula
    return image.convert("RGB")
