"""Images and masks on disk."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def save(path: Path, values: Any, mode: str | None = None) -> None:
    """An array as an image file; `mode` "P" adds a palette, "I;16" stores 16 bits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.asarray(values, dtype=np.uint16 if mode == "I;16" else np.uint8))
    if mode == "P":
        image = image.convert("L")
        image.putpalette(list(np.random.default_rng(0).integers(256, size=768)))
    image.save(path)


def save_pair(root: Path, image: str, mask: str, values: Any = None, size: tuple[int, int] = (6, 8)) -> None:
    """A grey image of `size` (height, width) and its mask, by default of zeros."""
    save(root / image, np.full((*size, 3), 100))
    save(root / mask, np.zeros(size) if values is None else values)
