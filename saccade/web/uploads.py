"""Check uploads before decoding them; error messages never contain a path of the server."""

import warnings
from pathlib import Path
from typing import NamedTuple

from PIL import Image, UnidentifiedImageError

from saccade.data.decode.image import DECODE_ERRORS
from saccade.explain.images import MAX_SIDE, load_image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")


class Limits(NamedTuple):
    """Limits per upload."""

    megabytes: float = 10.0
    megapixels: float = 40.0


class BadUpload(ValueError):
    """A rejected file; the message is shown to the user."""


def read_upload(path: str | Path | None, limits: Limits = Limits()) -> Image.Image:  # noqa: B008
    """Return the upload as an RGB image of bounded size in EXIF orientation, or raise `BadUpload`."""
    if not path:
        raise BadUpload("No image yet. Drop one, or choose a photograph.")
    path = Path(path)
    name = path.name
    try:
        size = path.stat().st_size / 1e6
    except OSError as error:
        raise BadUpload("The upload has expired (after one hour). Please upload it again.") from error
    if size > limits.megabytes:
        raise BadUpload(f"{name} has {size:.1f} MB; the limit is {limits.megabytes:g} MB. Reduce its size.")
    if not size:
        raise BadUpload(f"{name} is empty.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # `limits.megapixels` is checked below
            with Image.open(path, formats=FORMATS) as image:
                pixels = image.width * image.height / 1e6
    except (UnidentifiedImageError, Image.DecompressionBombError, *DECODE_ERRORS) as error:
        if isinstance(error, Image.DecompressionBombError):
            raise BadUpload(f"{name} has too many pixels; the limit is {limits.megapixels:g} megapixels.") from error
        raise BadUpload(f"{name} is not an image. Supported: JPEG, PNG, WebP, GIF, BMP and TIFF.") from error
    if pixels > limits.megapixels:
        raise BadUpload(f"{name} has {pixels:.0f} megapixels; the limit is {limits.megapixels:g}. Reduce its size.")
    try:
        return load_image(path, MAX_SIDE)
    except (*DECODE_ERRORS,) as error:
        raise BadUpload(f"{name} is damaged or incomplete.") from error
