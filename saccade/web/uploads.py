"""Check uploads before decoding them; error messages never contain a path of the server."""

import warnings
from pathlib import Path
from typing import NamedTuple

from PIL import Image, UnidentifiedImageError

from saccade.data import DECODE_ERRORS, VIDEO_SUFFIXES, BadImage, VideoFile, middle_frame, read_image
from saccade.explanation import MAX_SIDE
from saccade.web.memory import return_freed_memory

LARGE = 1.0  # megapixels
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")


class Limits(NamedTuple):
    """Limits per upload."""

    megabytes: float = 10.0
    megapixels: float = 40.0


class BadUpload(ValueError):
    """A rejected file; the message is shown to the user."""


def check_upload(path: str | Path | None, limits: Limits = Limits()) -> Path:  # noqa: B008
    """Return the path of an upload that exists, is not empty and not too large, or raise `BadUpload`."""
    if not path:
        raise BadUpload("No file yet. Drop one, or choose a photograph.")
    path = Path(path)
    try:
        size = path.stat().st_size / 1e6
    except OSError as error:
        raise BadUpload("The upload has expired (after one hour). Please upload it again.") from error
    if size > limits.megabytes:
        raise BadUpload(f"{path.name} has {size:.1f} MB; the limit is {limits.megabytes:g} MB. Reduce its size.")
    if not size:
        raise BadUpload(f"{path.name} is empty.")
    return path


def read_upload(path: str | Path | None, limits: Limits = Limits()) -> Image.Image:  # noqa: B008
    """Return the upload as an RGB image of bounded size in EXIF orientation, or raise `BadUpload`."""
    path = check_upload(path, limits)
    name = path.name
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
        return read_image(path, max_side=MAX_SIDE)
    except (BadImage, *DECODE_ERRORS) as error:
        raise BadUpload(f"{name} is damaged or incomplete.") from error
    finally:
        if pixels > LARGE:
            return_freed_memory()


def read_video(path: str | Path | None, limits: Limits = Limits()) -> Image.Image:  # noqa: B008
    """Return the middle frame of a video upload that can be decoded, or raise `BadUpload`."""
    path = check_upload(path, limits)
    try:
        frame = middle_frame(VideoFile(path))
    except (BadImage, *DECODE_ERRORS) as error:
        kinds = ", ".join(sorted(suffix[1:] for suffix in VIDEO_SUFFIXES))
        raise BadUpload(f"{path.name} is not a video that can be decoded. Supported: {kinds}.") from error
    finally:
        return_freed_memory()
    if frame.width * frame.height > 1e6 * limits.megapixels:
        raise BadUpload(f"{path.name} has too many pixels; the limit is {limits.megapixels:g} megapixels per frame.")
    frame.thumbnail((MAX_SIDE, MAX_SIDE))
    return frame
