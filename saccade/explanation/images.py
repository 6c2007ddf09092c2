"""Image input: a file, Pillow image, array or tensor becomes the model's input and a larger copy to draw on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from saccade._files import unique_stem
from saccade.data.decode.inputs import ImageInput, input_name, read_input
from saccade.data.transforms.image import eval_transform

MAX_SIDE = 1536  # larger images are downscaled; JPEG files already while decoding
MAX_ASPECT = 4  # longer side / shorter side; longer images are centre-cropped
CANVAS_SIDES = 448, 896  # smallest and largest canvas, as the side of a square of the same area


class View(NamedTuple):
    """One image at two resolutions with the same field of view: the model's input and the canvas to draw on."""

    name: str
    image: Tensor  # (3, H, W) in [0, 1], before normalisation
    canvas: np.ndarray  # (H', W', 3) uint8


def load_view(source: ImageInput, size: int, name: str = "", longest: int | None = None) -> View:
    """The image at about size x size pixels in its own aspect ratio, and the canvas.

    With `longest`, as detectors resize: the shorter side is `size`, unless the longer one would exceed `longest`.
    Sides are multiples of 32 (16 for size below 160) so that grid cells are complete; the remainder is cropped evenly.
    """
    original = read_input(source, max(MAX_SIDE, 2 * size))
    area_side = size
    if longest is not None:
        shorter, longer = sorted(original.size)
        area_side = round(min(size / shorter, longest / longer) * (shorter * longer) ** 0.5)
    height, width = input_size(original.height, original.width, area_side)
    resized = ImageOps.fit(original, (width, height), Image.Resampling.BICUBIC)
    scale = min(max(size, CANVAS_SIDES[0]), CANVAS_SIDES[1]) / (height * width) ** 0.5
    canvas = ImageOps.fit(original, (round(width * scale), round(height * scale)), Image.Resampling.BICUBIC)
    image = torch.from_numpy(np.array(resized)).permute(2, 0, 1).float() / 255
    return View(name or input_name(source), image, np.array(canvas))


def load_crop(source: ImageInput, size: int, crop_pct: float, interpolation: str, name: str = "") -> View:
    """The centre crop of size x size pixels that `saccade.predict` classifies, and the canvas with the same view."""
    original = read_input(source)
    image = eval_transform(size, crop_pct, interpolation)(original).float() / 255
    side = min(max(size, CANVAS_SIDES[0]), CANVAS_SIDES[1])
    canvas = ImageOps.fit(original, (side, side), Image.Resampling.BICUBIC, bleed=(1 - crop_pct) / 2)
    return View(name or input_name(source), image, np.array(canvas))


def input_size(height: int, width: int, size: int) -> tuple[int, int]:
    """Height and width of the model's input: about size² pixels, sides multiples of 16 or 32, aspect at most 4:1."""
    multiple = 32 if size >= 160 else 16
    aspect = min(max(width / height, 1 / MAX_ASPECT), MAX_ASPECT)
    sides = size / aspect**0.5, size * aspect**0.5
    rows, columns = (max(32, multiple * round(side / multiple)) for side in sides)
    return rows, columns


def unique_names(sources: Sequence[Any]) -> list[str]:
    """A name per source, with unique stems: a second "cat.jpg" becomes "cat-2.jpg"."""
    stems: set[str] = set()
    names = map(input_name, sources)
    return [unique_stem(name, stems) + Path(name).suffix for name in names]
