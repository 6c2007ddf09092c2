"""Pictures in: any file, array or tensor becomes one RGB picture of bounded size, and what the model and we look at."""

import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from saccade.data.decode.image import to_rgb

MAX_PIXELS = 120_000_000  # decoded at once this takes about half a gigabyte; above it we refuse before decoding
LONGEST = 1536  # a picture is kept at most this large; JPEG files are reduced while they are decoded
WIDEST = 4  # longest side over shortest: beyond it the middle is taken
DISPLAY = 448, 896  # pixels of a drawn picture at least and at most, as the side of a square of the same area

ImageSource = str | os.PathLike | Image.Image | np.ndarray | Tensor


class View(NamedTuple):
    """One picture as the model gets it and as we draw it: the same frame at two resolutions."""

    name: str
    image: Tensor  # (3, H, W) in [0, 1], what the model sees before normalisation
    picture: np.ndarray  # (H', W', 3) uint8, for drawing


def load_picture(source: ImageSource, longest: int = LONGEST) -> Image.Image:
    """An RGB picture, upright, with sides of at most `longest`; ValueError says what is wrong with a bad one."""
    if isinstance(source, (str, os.PathLike)):
        return _open(Path(source), longest)
    if isinstance(source, Tensor):
        source = _tensor_to_array(source)
    if isinstance(source, np.ndarray):
        source = _array_to_picture(source)
    if not isinstance(source, Image.Image):
        raise ValueError(f"expected a path, a Pillow image, an array or a tensor; got {type(source).__name__}.")
    return _finish(source.copy(), longest)


def load_view(source: ImageSource, size: int, name: str = "") -> View:
    """The whole picture at about size x size pixels in its own aspect, and a larger one of the same frame to draw on.

    Sides are multiples of 32 (16 for models made for less than 160 px), so that cells are whole; what does not fit
    is cut evenly from both ends. Pictures longer than 4:1 lose their ends.
    """
    picture = load_picture(source, max(LONGEST, 2 * size))
    height, width = frame(picture.height, picture.width, size)
    seen = ImageOps.fit(picture, (width, height), Image.Resampling.BICUBIC)
    scale = min(max(size, DISPLAY[0]), DISPLAY[1]) / (height * width) ** 0.5
    drawn = ImageOps.fit(picture, (round(width * scale), round(height * scale)), Image.Resampling.BICUBIC)
    image = torch.from_numpy(np.array(seen)).permute(2, 0, 1).float() / 255
    return View(name or source_name(source), image, np.array(drawn))


def frame(height: int, width: int, size: int) -> tuple[int, int]:
    """Height and width at which the model looks at a picture: about size² pixels, sides multiples of 16 or 32."""
    step = 32 if size >= 160 else 16
    aspect = min(max(width / height, 1 / WIDEST), WIDEST)
    sides = size / aspect**0.5, size * aspect**0.5
    rows, columns = (max(32, step * round(side / step)) for side in sides)
    return rows, columns


def as_list(images: ImageSource | Iterable[ImageSource]) -> list[ImageSource]:
    """One image or many; an array or tensor with four axes is a batch."""
    if isinstance(images, (np.ndarray, Tensor)) and images.ndim == 4:
        return list(images)
    if isinstance(images, (str, os.PathLike, Image.Image, np.ndarray, Tensor)):
        return [images]
    return list(images)


def source_name(source: Any) -> str:
    return Path(source).name if isinstance(source, (str, os.PathLike)) else "image"


def unique_names(sources: Sequence[ImageSource]) -> list[str]:
    """A name for every source, different before the dot too; a second "cat.jpg" becomes "cat-2.jpg"."""
    names: list[str] = []
    taken: set[str] = set()
    for source in sources:
        name = Path(source_name(source))
        stem, count = name.stem, 2
        while stem in taken:
            stem, count = f"{name.stem}-{count}", count + 1
        taken.add(stem)
        names.append(stem + name.suffix)
    return names


def _open(path: Path, longest: int) -> Image.Image:
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name the images in it, as in {path}/*.jpg.")
    if not path.exists():
        raise ValueError(f"no such image: {path}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # we have a limit of our own, below
            with Image.open(path) as file:
                _check_pixels(file.width * file.height, path)
                file.draft("RGB", (longest, longest))  # JPEG only: decode at 1/2, 1/4 or 1/8
                return _finish(file, longest)
    except Image.DecompressionBombError as error:
        raise ValueError(f"{path} would fill the memory ({error}). Reduce it first.") from error
    except UnidentifiedImageError as error:
        raise ValueError(f"{path} is not an image that Pillow can read.") from error
    except (OSError, SyntaxError, EOFError) as error:  # Pillow's names for a damaged file
        raise ValueError(f"{path} is damaged or incomplete: {error}") from error


def _check_pixels(pixels: int, path: Path) -> None:
    if pixels > MAX_PIXELS:
        raise ValueError(
            f"{path} has {pixels / 1e6:.0f} megapixels, the limit is {MAX_PIXELS / 1e6:.0f}. Reduce it first, "
            "for example with Image.thumbnail."
        )


def _finish(picture: Image.Image, longest: int) -> Image.Image:
    """Smaller first, then upright and RGB, so that the large picture is seldom copied."""
    if picture.mode in ("RGB", "L", "RGBA", "CMYK", "YCbCr"):  # modes that reduce well; others become one of them
        picture.thumbnail((longest, longest), Image.Resampling.BICUBIC, reducing_gap=2.0)
    picture = to_rgb(picture)
    picture.thumbnail((longest, longest), Image.Resampling.BICUBIC)
    return picture


def _tensor_to_array(image: Tensor) -> np.ndarray:
    image = image.detach().cpu()
    if image.ndim == 3 and image.shape[0] in (1, 3):
        image = image.permute(1, 2, 0)
    return image.numpy() if image.dtype == torch.uint8 else image.float().numpy()


def _array_to_picture(image: np.ndarray) -> Image.Image:
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[..., 0]
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (3, 4)) or image.size == 0:
        raise ValueError(f"expected an image (H, W), (H, W, 3) or a tensor (3, H, W); got {image.shape}.")
    if image.dtype != np.uint8:
        if not np.isfinite(image).all() or image.min() < 0 or image.max() > 1:
            raise ValueError(
                f"expected values in [0, 1] (or uint8), got {image.min():.3g} to {image.max():.3g}. "
                "Give the picture before normalisation: the model's own mean and std are applied here."
            )
        image = np.round(image * 255).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(image))
