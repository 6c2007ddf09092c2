"""Image input: a file, Pillow image, array or tensor becomes the model's input and a larger copy to draw on."""

import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from saccade.data.decode.image import FORMATS, supported_formats, to_rgb

MAX_PIXELS = 120_000_000  # about half a gigabyte once decoded; larger files are refused before decoding
MAX_SIDE = 1536  # larger images are downscaled; JPEG files already while decoding
MAX_ASPECT = 4  # longer side / shorter side; longer images are centre-cropped
CANVAS_SIDES = 448, 896  # smallest and largest canvas, as the side of a square of the same area

ImageSource = str | os.PathLike | Image.Image | np.ndarray | Tensor


class View(NamedTuple):
    """One image at two resolutions with the same field of view: the model's input and the canvas to draw on."""

    name: str
    image: Tensor  # (3, H, W) in [0, 1], before normalisation
    canvas: np.ndarray  # (H', W', 3) uint8


def load_image(source: ImageSource, max_side: int = MAX_SIDE) -> Image.Image:
    """RGB image, EXIF orientation applied, sides at most `max_side`; ValueError names what is wrong with a bad one."""
    if isinstance(source, (str, os.PathLike)):
        return _open(Path(source), max_side)
    if isinstance(source, Tensor):
        source = _tensor_to_array(source)
    if isinstance(source, np.ndarray):
        source = _array_to_image(source)
    if not isinstance(source, Image.Image):
        raise ValueError(f"expected a path, a Pillow image, an array or a tensor, got {type(source).__name__}.")
    return _downscale(source.copy(), max_side)


def load_view(source: ImageSource, size: int, name: str = "") -> View:
    """The image at about size x size pixels in its own aspect ratio, and the canvas.

    Sides are multiples of 32 (16 for size below 160) so that grid cells are complete; the remainder is cropped evenly.
    """
    original = load_image(source, max(MAX_SIDE, 2 * size))
    height, width = input_size(original.height, original.width, size)
    resized = ImageOps.fit(original, (width, height), Image.Resampling.BICUBIC)
    scale = min(max(size, CANVAS_SIDES[0]), CANVAS_SIDES[1]) / (height * width) ** 0.5
    canvas = ImageOps.fit(original, (round(width * scale), round(height * scale)), Image.Resampling.BICUBIC)
    image = torch.from_numpy(np.array(resized)).permute(2, 0, 1).float() / 255
    return View(name or source_name(source), image, np.array(canvas))


def input_size(height: int, width: int, size: int) -> tuple[int, int]:
    """Height and width of the model's input: about size² pixels, sides multiples of 16 or 32, aspect at most 4:1."""
    multiple = 32 if size >= 160 else 16
    aspect = min(max(width / height, 1 / MAX_ASPECT), MAX_ASPECT)
    sides = size / aspect**0.5, size * aspect**0.5
    rows, columns = (max(32, multiple * round(side / multiple)) for side in sides)
    return rows, columns


def normalize_images(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Images (B, C, H, W) or clips (B, C, T, H, W) in [0, 1], normalised by mean and std per channel.

    With one mean the colour channels are averaged first, for models with one input channel.
    """
    if len(mean) == 1:
        images = images.mean(1, keepdim=True)
    shape = (1, -1, *[1] * (images.ndim - 2))
    offset, scale = (torch.tensor(values, device=images.device).view(shape) for values in (mean, std))
    return (images - offset) / scale


def list_images(images: ImageSource | Iterable[ImageSource]) -> list[ImageSource]:
    """One image or many as a list; an array or tensor with four axes is a batch."""
    if isinstance(images, (np.ndarray, Tensor)) and images.ndim == 4:
        return list(images)
    if isinstance(images, (str, os.PathLike, Image.Image, np.ndarray, Tensor)):
        return [images]
    return list(images)


def source_name(source: Any) -> str:
    """File name of a path, "image" for anything else."""
    return Path(source).name if isinstance(source, (str, os.PathLike)) else "image"


def unique_names(sources: Sequence[Any]) -> list[str]:
    """A name per source, with unique stems: a second "cat.jpg" becomes "cat-2.jpg"."""
    names: list[str] = []
    stems: set[str] = set()
    for source in sources:
        name = Path(source_name(source))
        stem, count = name.stem, 2
        while stem in stems:
            stem, count = f"{name.stem}-{count}", count + 1
        stems.add(stem)
        names.append(stem + name.suffix)
    return names


def _open(path: Path, max_side: int) -> Image.Image:
    if path.is_dir():
        raise ValueError(f"expected an image file, got the folder {path}. Name the images in it, as in {path}/*.jpg.")
    if not path.exists():
        raise ValueError(f"no such image: {path}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # _check_pixels has its own limit
            with Image.open(path, formats=supported_formats()) as file:
                _check_pixels(file.width * file.height, path)
                file.draft("RGB", (max_side, max_side))  # JPEG only: decode at 1/2, 1/4 or 1/8
                return _downscale(file, max_side)
    except Image.DecompressionBombError as error:
        raise ValueError(f"{path} is too large to decode ({error}). Downscale it first.") from error
    except UnidentifiedImageError as error:
        raise ValueError(f"{path} is not a readable image. Expected one of {', '.join(FORMATS)}.") from error
    except (OSError, SyntaxError, EOFError) as error:  # what Pillow raises for a damaged file
        raise ValueError(f"{path} is damaged or incomplete: {error}") from error


def _check_pixels(pixels: int, path: Path) -> None:
    if pixels > MAX_PIXELS:
        raise ValueError(
            f"expected at most {MAX_PIXELS / 1e6:.0f} megapixels, got {pixels / 1e6:.0f} in {path}. "
            "Downscale it first, for example with Image.thumbnail."
        )


def _downscale(image: Image.Image, max_side: int) -> Image.Image:
    """Downscale before the conversion to RGB, which would copy the large image."""
    if image.mode in ("RGB", "L", "RGBA", "CMYK", "YCbCr"):  # palettes and 16-bit modes cannot be interpolated
        image.thumbnail((max_side, max_side), Image.Resampling.BICUBIC, reducing_gap=2.0)
    image = to_rgb(image)
    image.thumbnail((max_side, max_side), Image.Resampling.BICUBIC)
    return image


def _tensor_to_array(image: Tensor) -> np.ndarray:
    image = image.detach().cpu()
    if image.ndim == 3 and image.shape[0] in (1, 3):
        image = image.permute(1, 2, 0)
    return image.numpy() if image.dtype == torch.uint8 else image.float().numpy()


def _array_to_image(image: np.ndarray) -> Image.Image:
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[..., 0]
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (3, 4)) or image.size == 0:
        raise ValueError(f"expected an image (H, W), (H, W, 3) or a tensor (3, H, W), got {image.shape}.")
    if image.dtype != np.uint8:
        if not np.isfinite(image).all() or image.min() < 0 or image.max() > 1:
            raise ValueError(
                f"expected values in [0, 1] (or uint8), got {image.min():.3g} to {image.max():.3g}. "
                "Pass the image before normalisation: the model's own mean and std are applied here."
            )
        image = np.round(image * 255).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(image))
