"""Encoded image -> 8-bit RGB, and encoded mask -> integers, for every file type that datasets use."""

import io
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError

IMAGE_SUFFIXES = {
    ".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".jp2", ".avif",
}  # fmt: skip
# Pillow's other parsers (PSD, EPS, FITS, ...) are larger, less tested, and must not run on untrusted files.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF")
# Raised by Pillow for empty, truncated, oversized or unidentified files.
DECODE_ERRORS = (OSError, SyntaxError, ValueError, EOFError, IndexError, Image.DecompressionBombError)


class BadImage(ValueError):
    """An image that cannot be read. The message is `name: reason`."""

    def __init__(self, name: str, reason: object):
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, str(reason)

    def __reduce__(self):  # pickled by DataLoader workers
        return type(self), (self.name, self.reason)


def read_image(source: str | Path | bytes | Any, name: str | None = None) -> Image.Image:
    """Decode a path, bytes or an open binary file to RGB; raises `BadImage`, which carries `name`."""
    name = name or (str(source) if isinstance(source, (str, Path)) else "image")
    return _decode(source, name, to_rgb)


def read_mask_values(source: str | Path | bytes | Any, name: str) -> np.ndarray:
    """Integers (H, W) int64 of a palette, 8-bit or 16-bit grey file. The colours of a palette are ignored."""
    values, mode = _decode(source, name, lambda image: (np.array(image), image.mode))
    if values.ndim == 3 and values.shape[2] >= 3 and (values[..., :3] == values[..., :1]).all():
        values = values[..., 0]  # grey stored as RGB
    if values.ndim != 2 or values.dtype.kind not in "uib":
        raise BadImage(
            name,
            f"expected a mask with one channel of class indices, got a colour image (mode {mode}). "
            "Replace every colour by its class index and save as 8-bit PNG",
        )
    return values.astype(np.int64)


def _decode(source: Any, name: str, convert: Any) -> Any:
    """`convert` of the loaded Pillow image. Every file that saccade.data decodes is opened here."""
    try:
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        with Image.open(file, formats=supported_formats()) as image:
            image.load()
            return convert(image)
    except UnidentifiedImageError as error:
        raise BadImage(name, f"not a readable image. Expected one of {', '.join(FORMATS)}") from error
    except DECODE_ERRORS as error:
        raise BadImage(name, error) from error


@lru_cache(maxsize=1)
def supported_formats() -> tuple[str, ...]:
    """FORMATS that the installed Pillow can open; AVIF needs Pillow 11.3."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def to_rgb(image: Image.Image) -> Image.Image:
    """Apply EXIF orientation, composite transparency on white, scale 16-bit values, convert CMYK by its profile."""
    image = ImageOps.exif_transpose(image)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "CMYK":
        return _cmyk_to_rgb(image)
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        return _grey_to_rgb(image)
    if image.mode == "LAB":
        return _convert_profile(image, ImageCms.createProfile("LAB"))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def _grey_to_rgb(image: Image.Image) -> Image.Image:
    """16-bit, 32-bit and float grey, scaled to 8 bits by the range of the values instead of clipped at 255."""
    values = np.asarray(image, dtype=np.float64)
    if not np.isfinite(values).all() or values.min(initial=0) < 0:
        raise ValueError("grey values must be finite and not negative")
    maximum = values.max(initial=0)
    if image.mode.startswith("I"):
        white = 65535  # Pillow opens 16-bit files as "I" or "I;16"
    else:
        white = 1 if maximum <= 1 else 255 if maximum <= 255 else 65535
    if maximum > white:
        raise ValueError(f"expected grey values of at most 16 bits, got {maximum:g}. Convert the file first")
    return Image.fromarray((values * (255 / white) + 0.5).astype(np.uint8)).convert("RGB")


def _cmyk_to_rgb(image: Image.Image) -> Image.Image:
    profile = image.info.get("icc_profile")
    if profile:
        try:
            return _convert_profile(image, ImageCms.ImageCmsProfile(io.BytesIO(profile)))
        except (ImageCms.PyCMSError, OSError):
            pass  # invalid profile: fall back to Pillow's formula
    return image.convert("RGB")


def _convert_profile(image: Image.Image, source: Any) -> Image.Image:
    converted = ImageCms.profileToProfile(image, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
    assert converted is not None  # None only for in-place conversion
    return converted
