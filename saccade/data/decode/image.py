"""One encoded picture -> correct 8-bit RGB, whatever camera, scanner or web page wrote it."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageCms, ImageOps

# What Pillow raises for files that are empty, cut off, of another kind, or far too large.
DAMAGE = (OSError, SyntaxError, ValueError, EOFError, IndexError, Image.DecompressionBombError)


class BadImage(ValueError):
    """A picture that cannot be read; the message names the file and the reason."""

    def __init__(self, name: str, reason: object):
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, str(reason)

    def __reduce__(self):  # it travels from loader processes
        return BadImage, (self.name, self.reason)


def read_image(source: str | Path | bytes | Any, name: str | None = None) -> Image.Image:
    """A file's path, its bytes, or an open binary file -> an RGB image; `BadImage` names a damaged one."""
    name = name or (str(source) if isinstance(source, (str, Path)) else "image")
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            image.load()
            return to_rgb(image)
    except DAMAGE as error:
        raise BadImage(name, error) from error


def to_rgb(image: Image.Image) -> Image.Image:
    """EXIF orientation applied, transparency laid on white, 16-bit scaled (not clipped), CMYK by its profile."""
    image = ImageOps.exif_transpose(image)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "CMYK":
        return _from_cmyk(image)
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        return _from_deep(image)
    if image.mode == "LAB":
        srgb = ImageCms.createProfile("sRGB")
        return _converted(image, ImageCms.createProfile("LAB"), srgb)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        opaque = image.convert("RGBA")
        white = Image.new("RGBA", opaque.size, "white")
        return Image.alpha_composite(white, opaque).convert("RGB")
    return image.convert("RGB")


def _from_deep(image: Image.Image) -> Image.Image:
    """16-bit and 32-bit grey: scaled by the range its values lie in, never clipped at 255."""
    values = np.asarray(image, dtype=np.float64)
    if not np.isfinite(values).all() or values.min(initial=0) < 0:
        raise ValueError("grey values must be finite and not negative")
    top = values.max(initial=0)
    if image.mode.startswith("I"):
        full = 65535  # Pillow opens 16-bit files as "I" or "I;16"
    else:
        full = 1 if top <= 1 else 255 if top <= 255 else 65535
    if top > full:
        raise ValueError(f"grey values reach {top:g}, beyond 16 bits; convert the file first")
    return Image.fromarray((values * (255 / full) + 0.5).astype(np.uint8)).convert("RGB")


def _from_cmyk(image: Image.Image) -> Image.Image:
    profile = image.info.get("icc_profile")
    if profile:
        try:
            return _converted(image, ImageCms.ImageCmsProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB"))
        except (ImageCms.PyCMSError, OSError):
            pass  # a broken profile: the plain formula is the best there is
    return image.convert("RGB")


def _converted(image: Image.Image, source: Any, target: Any) -> Image.Image:
    converted = ImageCms.profileToProfile(image, source, target, outputMode="RGB")
    assert converted is not None  # None only for in-place conversion
    return converted
