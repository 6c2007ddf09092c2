"""A folder of images with masks."""

from pathlib import Path

import numpy as np
from PIL import Image


def quarters(height: int = 48, width: int = 64) -> np.ndarray:
    """Labels 0 to 3 of the four quarters of an image."""
    row, column = np.arange(height) * 2 // height, np.arange(width) * 2 // width
    return (row[:, None] * 2 + column[None]).astype(np.uint8)


def write_folders(root: Path) -> Path:
    """Three images of four flat quarters, with the quarters as masks; the last mask has unlabelled pixels."""
    rng = np.random.default_rng(0)
    for name in ("images", "annotations"):
        (root / name / "val").mkdir(parents=True)
    for i in range(3):
        mask = quarters()
        colours = rng.integers(0, 256, (4, 3), dtype=np.uint8)
        Image.fromarray(colours[mask]).save(root / "images" / "val" / f"{i}.jpg", quality=95)
        if i == 2:
            mask[:5] = 255
        Image.fromarray(mask).save(root / "annotations" / "val" / f"{i}.png")
    return root
