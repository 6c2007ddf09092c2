"""The embedded dataset: rendered scenes with class, masks, boxes and motion, at any size and in any number.

A scene is a textured background with one large object and up to three small ones. Its class is the shape of the large
object. Position, scale, rotation, colours, texture, shading and clutter are independent of the class, so a linear model
stays near chance. Scene i is a function of (seed, split, i), with the same content at every size. Objects move: `clip`
renders a scene at several times, labelled with the motion of the large object.
"""

from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from saccade.data.sources.base import DataError
from saccade.data.sources.objects import Objects, to_coco
from saccade.data.synthetic import SPLIT_SEEDS

SHAPES = ["disc", "square", "triangle", "star", "cross", "ring", "crescent", "heart", "hexagon", "bars"]
SHAPE_MOTIONS = ["still", "right", "left", "down", "up", "clockwise", "counterclockwise", "growing", "shrinking"]
HALF_SIDE = 0.5  # the image spans [-HALF_SIDE, HALF_SIDE] along x and y


class Sprite(NamedTuple):
    """Parameters of one object, in units of the image side."""

    shape: int
    motion: int
    centre: np.ndarray  # (2,) x y
    radius: float
    angle: float
    colours: np.ndarray  # (2, 3) of its texture, 0 to 1
    stripes: float  # periods of its texture per radius; 0 is a single colour
    texture_angle: float  # direction of its texture and shading
    speed: float  # per clip


class Background(NamedTuple):
    """A colour plus a sum of sine waves per channel."""

    colour: np.ndarray  # (3,)
    waves: np.ndarray  # (3, 4, 4): per channel four waves of frequency x, frequency y, phase, amplitude


class Frame(NamedTuple):
    """A rendered scene with the annotations of every task."""

    image: np.ndarray  # (H, W, 3) uint8
    label: int  # shape of the large object
    mask: np.ndarray  # (H, W) uint8: 0 background, else 1 + shape
    instances: np.ndarray  # (H, W) uint8: 0 background, else 1 + index in `boxes`
    boxes: np.ndarray  # (n, 4) float32: x0 y0 x1 y1 in pixels, around the visible part
    shapes: np.ndarray  # (n,) int64
    visible: np.ndarray  # (n,) float32: fraction of each object that is not occluded


class Clip(NamedTuple):
    """A scene at several times."""

    frames: list[Frame]
    label: int  # motion of the large object


class SceneImages:
    """`count` scenes. Indices beyond `count` work too."""

    classes = SHAPES

    def __init__(self, count: int = 2048, size: int = 64, split: str = "train", seed: int = 0):
        if split not in SPLIT_SEEDS:
            raise DataError(f"expected a split of {', '.join(SPLIT_SEEDS)}, got {split!r}.")
        if size < 16 or count < 1:
            raise DataError(f"expected at least 1 scene of at least 16 px, got {count} of {size} px.")
        self.count, self.size, self.split, self.seed = count, size, split, seed

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> Image.Image:
        return Image.fromarray(self.frame(index).image)

    def name(self, index: int) -> str:
        return f"scenes ({self.split}, seed {self.seed}), scene {index}"

    def frame(self, index: int) -> Frame:
        """Scene `index` in the middle of its clip."""
        return render(*self._parameters(index), self.size)

    def clip(self, index: int, frames: int = 8) -> Clip:
        """Scene `index` at `frames` times."""
        sprites, background = self._parameters(index)
        times = np.linspace(0, 1, frames)
        return Clip([render(sprites, background, self.size, time) for time in times], sprites[0].motion)

    def _parameters(self, index: int) -> tuple[list[Sprite], Background]:
        rng = np.random.default_rng([self.seed, SPLIT_SEEDS[self.split], index])
        brightness = rng.uniform(0.1, 0.9)  # of the background; objects contrast with it
        background = Background(np.clip(brightness + rng.uniform(-0.15, 0.15, 3), 0, 1), rng.uniform(-1, 1, (3, 4, 4)))
        large = _sample_sprite(rng, index % len(SHAPES), rng.uniform(0.24, 0.4), brightness)
        shapes = rng.integers(len(SHAPES), size=rng.integers(4))
        small = [_sample_sprite(rng, int(shape), rng.uniform(0.05, 0.1), brightness) for shape in shapes]
        return [large, *small], background


class Scenes(SceneImages):
    """Scenes with the class of their large object."""

    def __init__(self, count: int = 2048, size: int = 64, split: str = "train", seed: int = 0):
        super().__init__(count, size, split, seed)
        self.labels = np.arange(count, dtype=np.int64) % len(SHAPES)  # balanced; the loader shuffles


class SceneMasks(SceneImages):
    """Scenes with masks of 11 classes: the background and the shapes."""

    classes = ["backdrop", *SHAPES]  # noqa: RUF012

    def read_mask(self, index: int) -> np.ndarray:
        return self.frame(index).mask


class SceneObjects(SceneImages):
    """Scenes with objects. Objects occluded by more than half are marked as crowd: not trained on, not scored."""

    has_masks = True

    def __init__(self, count: int = 512, size: int = 128, split: str = "train", seed: int = 0):
        super().__init__(count, size, split, seed)
        self.category_ids = list(range(1, len(self.classes) + 1))
        self.image_ids = np.arange(1, count + 1)
        self._last: tuple[int, Frame] | None = None

    def frame(self, index: int) -> Frame:
        """Scene `index`. The last one is cached, because image and objects are read one after the other."""
        if self._last is None or self._last[0] != index:
            self._last = index, super().frame(index)
        return self._last[1]

    def objects(self, index: int, size: tuple[int, int] | None = None) -> Objects:
        frame = self.frame(index)
        count = len(frame.boxes)
        masks = (frame.instances == np.arange(1, count + 1)[:, None, None]).astype(np.uint8)
        ids = 100 * index + np.arange(1, count + 1)
        return Objects(frame.boxes, frame.shapes + 1, masks, frame.visible < 0.5, ids)

    def ground_truth(self) -> dict[str, Any]:
        return to_coco(self)


def _sample_sprite(rng: np.random.Generator, shape: int, radius: float, brightness: float) -> Sprite:
    limit = HALF_SIDE - radius
    contrast = rng.uniform(0.35, 0.6) * (1 if brightness < 0.5 else -1)
    colour = brightness + contrast + rng.uniform(-0.2, 0.2, 3)
    return Sprite(
        shape=shape,
        motion=int(rng.integers(len(SHAPE_MOTIONS))),
        centre=rng.uniform(-limit, limit, 2),
        radius=radius,
        angle=rng.uniform(0, 2 * np.pi),
        colours=np.clip([colour, colour + rng.uniform(-0.2, 0.2, 3)], 0, 1),
        stripes=float(rng.choice([0.0, 0.0, 1.5, 2.5])),
        texture_angle=rng.uniform(0, 2 * np.pi),
        speed=rng.uniform(0.6, 1.0),
    )


def render(sprites: list[Sprite], background: Background, size: int, time: float = 0.5) -> Frame:
    """Draw a scene back to front: background, small objects, then the large one. Objects below 4 pixels are dropped."""
    axis = ((np.arange(size) + 0.5) / size - HALF_SIDE).astype(np.float32)
    x, y = np.meshgrid(axis, axis)
    canvas = _render_background(background, axis)  # (H, W, 3)
    instances = np.zeros((size, size), np.uint8)
    areas = np.zeros(len(sprites), np.float32)  # in pixels, occluded or not
    for i, sprite in reversed(list(enumerate(_move(sprite, time) for sprite in sprites))):
        region = _bounding_slices(sprite, size)
        coverage, colour = _render_sprite(sprite, x[region], y[region], 1 / size)
        canvas[region] += coverage[..., None] * (colour - canvas[region])
        instances[region][coverage > 0.5] = i + 1
        areas[i] = (coverage > 0.5).sum()
    drawn = [i for i in range(len(sprites)) if (instances == i + 1).sum() >= 4]
    new_index = np.zeros(len(sprites) + 1, np.uint8)
    new_index[[i + 1 for i in drawn]] = np.arange(len(drawn)) + 1
    instances = new_index[instances]
    boxes = np.array([_bounding_box(instances == k + 1) for k in range(len(drawn))], np.float32).reshape(-1, 4)
    shapes = np.array([sprites[i].shape for i in drawn], np.int64)
    visible = np.array([(instances == k + 1).sum() / areas[i] for k, i in enumerate(drawn)], np.float32)
    mask = np.concatenate([[0], shapes + 1]).astype(np.uint8)[instances]
    image = (np.clip(canvas, 0, 1) * 255 + 0.5).astype(np.uint8)
    return Frame(image, sprites[0].shape, mask, instances, boxes, shapes, visible)


def _move(sprite: Sprite, time: float) -> Sprite:
    """The object at `time` (0 to 1) of its clip; at 0.5 it has its sampled parameters."""
    progress = sprite.speed * (time - 0.5)
    directions = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}
    motion = SHAPE_MOTIONS[sprite.motion]
    if motion in directions:
        return sprite._replace(centre=sprite.centre + 0.4 * progress * np.array(directions[motion]))
    if motion in ("clockwise", "counterclockwise"):  # y points down, so a growing angle is clockwise
        return sprite._replace(angle=sprite.angle + (1 if motion == "clockwise" else -1) * progress * np.pi / 2)
    if motion in ("growing", "shrinking"):
        return sprite._replace(radius=sprite.radius * 2 ** (progress if motion == "growing" else -progress))
    return sprite


def _bounding_slices(sprite: Sprite, size: int) -> tuple[slice, slice]:
    """Rows and columns around the object: shapes extend to at most 1.3 radii, soft edges to one pixel more."""
    extent = 1.3 * sprite.radius * size + 1
    centre = (sprite.centre + HALF_SIDE) * size
    first, last = np.clip([np.floor(centre - extent), np.ceil(centre + extent)], 0, size).astype(int)
    return slice(first[1], last[1]), slice(first[0], last[0])


def _render_background(background: Background, axis: np.ndarray) -> np.ndarray:
    """(H, W, 3). sin(a + b) = sin a cos b + cos a sin b, so sines are evaluated along the axes only."""
    frequency_x, frequency_y, phase, amplitude = np.moveaxis(background.waves, 2, 0)[..., None].astype(np.float32)
    columns, rows = 14 * frequency_x * axis + 6 * phase, 14 * frequency_y * axis  # (3, 4, size)
    terms = [(amplitude * np.cos(rows), np.sin(columns)), (amplitude * np.sin(rows), np.cos(columns))]
    waves = sum(down.swapaxes(1, 2) @ right for down, right in terms)  # (3, H, W)
    canvas = 0.06 * waves + background.colour[:, None, None].astype(np.float32)
    return np.ascontiguousarray(canvas.transpose(1, 2, 0))


def _render_sprite(sprite: Sprite, x: np.ndarray, y: np.ndarray, pixel: float) -> tuple[np.ndarray, np.ndarray]:
    """Antialiased coverage (H, W) and colour (H, W, 3) of one object."""
    cos, sin = float(np.cos(sprite.angle)), float(np.sin(sprite.angle))  # Python floats keep the arrays in float32
    (left, top), radius = sprite.centre.tolist(), float(sprite.radius)
    u, v = (x - left) / radius, (y - top) / radius
    u, v = cos * u + sin * v, cos * v - sin * u
    distance = SIGNED_DISTANCES[SHAPES[sprite.shape]](u, v)
    coverage = np.clip(distance * (radius / pixel) + 0.5, 0, 1)
    along = float(np.cos(sprite.texture_angle)) * u + float(np.sin(sprite.texture_angle)) * v
    mix = (np.sin(2 * np.pi * sprite.stripes * along) > 0) if sprite.stripes else np.zeros_like(along)
    colours = sprite.colours.astype(np.float32)
    colour = colours[0] + mix[..., None].astype(np.float32) * (colours[1] - colours[0])
    return coverage, colour * (0.85 + 0.15 * along[..., None])


def _polygon(u: np.ndarray, v: np.ndarray, sides: int) -> np.ndarray:
    """Signed distance to the nearest side of a regular polygon with corners at radius 1."""
    step = 2 * np.pi / sides
    angle = (np.arctan2(v, u) + np.pi) % step - step / 2
    return np.cos(np.pi / sides) - np.hypot(u, v) * np.cos(angle)


def _star(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    step = 2 * np.pi / 5
    angle = np.abs((np.arctan2(v, u) + np.pi) % step - step / 2)  # 0 at an inner corner, step/2 at a tip
    p, q = np.hypot(u, v) * np.cos(angle), np.hypot(u, v) * np.sin(angle)
    inner, tip = np.array([0.4, 0.0]), np.array([np.cos(step / 2), np.sin(step / 2)])
    side = tip - inner
    return (side[0] * q - side[1] * (p - inner[0])) / np.hypot(*side)


def _heart(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """A square rotated by 45 degrees, with a disc on each upper side."""
    half = 0.5
    a, b = (u + v + 0.15) * np.sqrt(0.5), (v - u + 0.15) * np.sqrt(0.5)
    square = half - np.maximum(np.abs(a), np.abs(b))
    return np.maximum(square, half - np.minimum(np.hypot(a + half, b), np.hypot(a, b + half)))


# Distance to the outline of each shape in radii, positive inside (approximate near corners).
SIGNED_DISTANCES = {
    "disc": lambda u, v: 0.9 - np.hypot(u, v),
    "square": lambda u, v: 0.8 - np.maximum(np.abs(u), np.abs(v)),
    "triangle": lambda u, v: _polygon(u, v, 3),
    "star": _star,
    "cross": lambda u, v: np.maximum(
        np.minimum(0.95 - np.abs(u), 0.3 - np.abs(v)), np.minimum(0.95 - np.abs(v), 0.3 - np.abs(u))
    ),
    "ring": lambda u, v: 0.22 - np.abs(np.hypot(u, v) - 0.72),
    "crescent": lambda u, v: np.minimum(0.95 - np.hypot(u, v), np.hypot(u - 0.5, v) - 0.75),
    "heart": _heart,
    "hexagon": lambda u, v: _polygon(u, v, 6),
    "bars": lambda u, v: np.minimum(0.85 - np.abs(u), 0.17 - np.abs(np.abs(v) - 0.45)),
}


def _bounding_box(mask: np.ndarray) -> tuple[float, float, float, float]:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)
