"""What strangers send: checked before it is decoded, with an answer they can act on and no path of ours in it."""

import warnings
from pathlib import Path
from typing import NamedTuple

from PIL import Image, UnidentifiedImageError

from saccade.data.image import DAMAGE
from saccade.explain.images import MAX_SIDE, load_image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")


class Limits(NamedTuple):
    """Of one upload."""

    megabytes: float = 10.0
    megapixels: float = 40.0


class BadUpload(ValueError):
    """A file that is refused; the message is for the person who sent it."""


def read_upload(path: str | Path | None, limits: Limits = Limits()) -> Image.Image:  # noqa: B008
    """A picture in RGB, upright, of bounded size; `BadUpload` says what is wrong with the file."""
    if not path:
        raise BadUpload("There is no picture yet. Drop one, or pick a photograph.")
    path = Path(path)
    name = path.name
    try:
        size = path.stat().st_size / 1e6
    except OSError as error:
        raise BadUpload("The upload is gone: it was kept for an hour. Please send it again.") from error
    if size > limits.megabytes:
        raise BadUpload(f"{name} has {size:.1f} MB; the limit is {limits.megabytes:g} MB. Save it smaller.")
    if not size:
        raise BadUpload(f"{name} is empty.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is below
            with Image.open(path, formats=FORMATS) as image:
                pixels = image.width * image.height / 1e6
    except (UnidentifiedImageError, Image.DecompressionBombError, *DAMAGE) as error:
        if isinstance(error, Image.DecompressionBombError):
            raise BadUpload(
                f"{name} has far too many pixels; the limit is {limits.megapixels:g} megapixels."
            ) from error
        raise BadUpload(f"{name} is not a picture. JPEG, PNG, WebP, GIF, BMP and TIFF can be read here.") from error
    if pixels > limits.megapixels:
        raise BadUpload(f"{name} has {pixels:.0f} megapixels; the limit is {limits.megapixels:g}. Make it smaller.")
    try:
        return load_image(path, MAX_SIDE)
    except (*DAMAGE,) as error:
        raise BadUpload(f"{name} is damaged or incomplete.") from error
