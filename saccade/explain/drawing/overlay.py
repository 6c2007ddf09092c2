"""Paint on a picture: heat, spotlights, masks, borders, boxes, points. Arrays (H, W, 3) uint8 in, the same out."""

import numpy as np
from PIL import Image, ImageDraw

from saccade.explain.drawing.colours import BLUE_RED, colour_scale


def blend(picture: np.ndarray, colours: np.ndarray, alpha: np.ndarray | float) -> np.ndarray:
    """(1 - alpha) of the picture and alpha of the colours; alpha is a number or (H, W)."""
    alpha = np.asarray(alpha, dtype=np.float64)[..., None]
    return (picture * (1 - alpha) + colours * alpha).round().astype(np.uint8)


def to_grey(picture: np.ndarray) -> np.ndarray:
    """Without colour, and a little brighter in the darks, as a ground that colours show on."""
    grey = picture @ np.array([0.299, 0.587, 0.114])
    return np.repeat((40 + grey * (215 / 255)).round().astype(np.uint8)[..., None], 3, -1)


def scale_to_one(values: np.ndarray, from_zero: bool = False) -> np.ndarray:
    """Stretch to [0, 1]; a constant becomes 0. `from_zero` keeps 0 at 0 and only divides by the maximum."""
    low = 0.0 if from_zero else float(values.min())
    span = float(values.max()) - low
    return (values - low) / span if span > 0 else np.zeros_like(values)


def heat(picture: np.ndarray, values: np.ndarray, codes: str = BLUE_RED, alpha: float = 0.6) -> np.ndarray:
    """A map (H, W) over the picture, lowest value blue, highest red."""
    return blend(to_grey(picture), colour_scale(scale_to_one(values), codes), alpha)


def tint(picture: np.ndarray, values: np.ndarray, colour: tuple[int, int, int], alpha: float = 0.85) -> np.ndarray:
    """One colour, as strong as the map (H, W) in [0, 1] says."""
    return blend(to_grey(picture), np.array(colour), alpha * np.clip(values, 0, 1))


def spotlight(picture: np.ndarray, values: np.ndarray, dark: float = 0.55) -> np.ndarray:
    """The picture lit where the map is high: in full colour at its maximum, grey and `dark` where it is 0."""
    light = scale_to_one(values, from_zero=True) ** 0.7
    return blend(to_grey(picture) * dark, picture, light)


def masked(picture: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The picture where the mask is true, black elsewhere."""
    return picture * mask[..., None].astype(np.uint8)


def border_mask(labels: np.ndarray, thickness: int = 1) -> np.ndarray:
    """True on both sides of every line between two labels (H, W), `thickness` pixels each side."""
    edge = np.zeros(labels.shape, dtype=bool)
    for k in range(1, thickness + 1):
        down = labels[k:] != labels[:-k]
        right = labels[:, k:] != labels[:, :-k]
        edge[k:] |= down
        edge[:-k] |= down
        edge[:, k:] |= right
        edge[:, :-k] |= right
    return edge


def borders(picture: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """White lines between the labels, with a dark rim so that they show on any ground.

    Where labels crumble to crumbs, lines would hide the picture: they fade when they take more than 15 % of it.
    """
    rim, line = border_mask(labels, 2), border_mask(labels, 1)
    strength = float(np.clip((0.35 - line.mean()) / 0.2, 0, 1))
    drawn = blend(picture, np.zeros(3), 0.6 * strength * rim)
    return blend(drawn, np.full(3, 255), strength * line)


def boxes(
    picture: np.ndarray, regions: np.ndarray, colours: np.ndarray, width: int = 2, rim: bool = False
) -> np.ndarray:
    """Outlines of regions (M, 4), x0 y0 x1 y1 in units of the picture, in the tokens' colours (M, 3)."""
    canvas = Image.fromarray(picture)
    draw = ImageDraw.Draw(canvas)
    height, width_px = picture.shape[:2]
    for region, colour in zip(np.asarray(regions, dtype=float), colours, strict=True):
        x0, x1 = sorted((region[0] * width_px, region[2] * width_px))
        y0, y1 = sorted((region[1] * height, region[3] * height))
        corners = [round(v) for v in (x0, y0, x1 - 1, y1 - 1)]
        corners[2:] = max(corners[0], corners[2]), max(corners[1], corners[3])
        if rim:
            outer = [corners[0] - 2, corners[1] - 2, corners[2] + 2, corners[3] + 2]
            draw.rectangle(outer, outline=(0, 0, 0), width=width + 4)
        draw.rectangle(corners, outline=tuple(int(c) for c in colour), width=width)
    return np.array(canvas)


def dots(picture: np.ndarray, points: np.ndarray, colours: np.ndarray, radius: float = 2.0) -> np.ndarray:
    """Points (M, P, 2), x y in units of the picture, in the tokens' colours (M, 3)."""
    canvas = Image.fromarray(picture)
    draw = ImageDraw.Draw(canvas)
    scale = np.array([picture.shape[1], picture.shape[0]])
    for token, colour in zip(np.asarray(points, dtype=float), colours, strict=True):
        for x, y in token * scale - 0.5:
            draw.ellipse([x - radius, y - radius, x + radius, y + radius], fill=tuple(int(c) for c in colour))
    return np.array(canvas)
