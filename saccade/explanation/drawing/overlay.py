"""Draw on an image: heat maps, spotlights, masks, borders, boxes, points. Arrays (H, W, 3) uint8 in and out."""

import numpy as np
from PIL import Image, ImageDraw

from saccade.explanation.drawing.colours import BLUE_RED, colour_scale


def downscale(image: np.ndarray, width: int = 256) -> np.ndarray:
    """The image at most `width` pixels wide."""
    if image.shape[1] <= width:
        return image
    height = round(image.shape[0] * width / image.shape[1])
    return np.array(Image.fromarray(image).resize((width, height), Image.Resampling.LANCZOS))


def blend(image: np.ndarray, colours: np.ndarray, alpha: np.ndarray | float) -> np.ndarray:
    """(1 - alpha) * image + alpha * colours; alpha is a number or (H, W)."""
    alpha = np.asarray(alpha, dtype=np.float64)[..., None]
    return (image * (1 - alpha) + colours * alpha).round().astype(np.uint8)


def to_grey(image: np.ndarray) -> np.ndarray:
    """Luma in three equal channels with lifted shadows, as a background for colours."""
    grey = image @ np.array([0.299, 0.587, 0.114])
    return np.repeat((40 + grey * (215 / 255)).round().astype(np.uint8)[..., None], 3, -1)


def rescale(values: np.ndarray, from_zero: bool = False) -> np.ndarray:
    """Rescale to [0, 1]; a constant becomes 0. With `from_zero`, only divide by the maximum."""
    low = 0.0 if from_zero else float(values.min())
    span = float(values.max()) - low
    return (values - low) / span if span > 0 else np.zeros_like(values)


def draw_heat(image: np.ndarray, values: np.ndarray, codes: str = BLUE_RED, alpha: float = 0.6) -> np.ndarray:
    """A map (H, W) over the grey image, lowest value blue, highest red."""
    return blend(to_grey(image), colour_scale(rescale(values), codes), alpha)


def tint(image: np.ndarray, values: np.ndarray, colour: tuple[int, int, int], alpha: float = 0.85) -> np.ndarray:
    """One colour over the grey image, its opacity proportional to the map (H, W) in [0, 1]."""
    return blend(to_grey(image), np.array(colour), alpha * np.clip(values, 0, 1))


def spotlight(image: np.ndarray, values: np.ndarray, dark: float = 0.55) -> np.ndarray:
    """The image in full colour where the map has its maximum, fading to grey times `dark` where it is 0."""
    return blend(to_grey(image) * dark, image, rescale(values, from_zero=True) ** 0.7)


def apply_mask(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The image where the mask is true, black elsewhere."""
    return image * mask[..., None].astype(np.uint8)


def border_mask(labels: np.ndarray, thickness: int = 1) -> np.ndarray:
    """Pixels within `thickness` on either side of a boundary between labels (H, W)."""
    edge = np.zeros(labels.shape, dtype=bool)
    for k in range(1, thickness + 1):
        down = labels[k:] != labels[:-k]
        right = labels[:, k:] != labels[:, :-k]
        edge[k:] |= down
        edge[:-k] |= down
        edge[:, k:] |= right
        edge[:, :-k] |= right
    return edge


def draw_borders(image: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """White lines with a dark outline between the labels.

    The lines fade out when they cover more than 15 % of the image, so fragmented labels do not hide it.
    """
    outline, line = border_mask(labels, 2), border_mask(labels, 1)
    strength = float(np.clip((0.35 - line.mean()) / 0.2, 0, 1))
    drawn = blend(image, np.zeros(3), 0.6 * strength * outline)
    return blend(drawn, np.full(3, 255), strength * line)


def draw_boxes(
    image: np.ndarray, regions: np.ndarray, colours: np.ndarray, width: int = 2, outline: bool = False
) -> np.ndarray:
    """Outlines of regions (M, 4), x0 y0 x1 y1 in [0, 1], in the colours (M, 3); `outline` adds a dark rim."""
    canvas = Image.fromarray(image)
    draw = ImageDraw.Draw(canvas)
    image_height, image_width = image.shape[:2]
    for region, colour in zip(np.asarray(regions, dtype=float), colours, strict=True):
        x0, x1 = sorted((region[0] * image_width, region[2] * image_width))
        y0, y1 = sorted((region[1] * image_height, region[3] * image_height))
        corners = [round(v) for v in (x0, y0, x1 - 1, y1 - 1)]
        corners[2:] = max(corners[0], corners[2]), max(corners[1], corners[3])
        if outline:
            outer = [corners[0] - 2, corners[1] - 2, corners[2] + 2, corners[3] + 2]
            draw.rectangle(outer, outline=(0, 0, 0), width=width + 4)
        draw.rectangle(corners, outline=tuple(int(c) for c in colour), width=width)
    return np.array(canvas)


def draw_points(image: np.ndarray, points: np.ndarray, colours: np.ndarray, radius: float = 2.0) -> np.ndarray:
    """Points (M, P, 2), x y in [0, 1], as discs in the colours (M, 3)."""
    canvas = Image.fromarray(image)
    draw = ImageDraw.Draw(canvas)
    scale = np.array([image.shape[1], image.shape[0]])
    for token, colour in zip(np.asarray(points, dtype=float), colours, strict=True):
        for x, y in token * scale - 0.5:
            draw.ellipse([x - radius, y - radius, x + radius, y + radius], fill=tuple(int(c) for c in colour))
    return np.array(canvas)
