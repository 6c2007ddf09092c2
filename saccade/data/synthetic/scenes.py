"""The embedded set: rendered scenes with class, masks, boxes and motion. No download, no end, any size.

A scene is a textured backdrop with one large object and some small ones. Its class is the shape of the large object;
place, scale, turn, colours, texture, shading and clutter say nothing about it, so a linear model stays near chance.
Everything about scene number i follows from (seed, i), and it looks the same at every size. Objects move: `clip`
renders a scene at several moments, and the way its large object moves is the class of the clip.
"""

from typing import NamedTuple

import numpy as np
from PIL import Image

from saccade.data.sources.base import DataError

SHAPES = ["disc", "square", "triangle", "star", "cross", "ring", "crescent", "heart", "hexagon", "bars"]
MOTIONS = ["still", "right", "left", "down", "up", "clockwise", "counterclockwise", "growing", "shrinking"]
SPLITS = {"train": 0, "val": 1, "test": 2}
SIDE = 0.5  # the window of a scene spans [-SIDE, SIDE] in both directions


class Thing(NamedTuple):
    """One object of a scene, in units of the window."""

    shape: int
    motion: int
    centre: np.ndarray  # (2,) x y
    radius: float
    turn: float
    inks: np.ndarray  # (2, 3) colours of its texture, 0 to 1
    stripes: float  # periods of its texture per radius; 0 is plain
    slant: float  # direction of its texture and shading
    speed: float  # along its motion, per clip


class Backdrop(NamedTuple):
    """What lies behind the objects: a colour, and waves of colour over it."""

    base: np.ndarray  # (3,)
    waves: np.ndarray  # (3, 4, 4): per colour four waves of direction x, direction y, phase, height


class Frame(NamedTuple):
    """A rendered moment, with everything a task may ask for."""

    image: np.ndarray  # (H, W, 3) uint8
    label: int  # shape of the large object
    mask: np.ndarray  # (H, W) uint8: 0 backdrop, else 1 + shape
    instances: np.ndarray  # (H, W) uint8: 0 backdrop, else 1 + position in `boxes`
    boxes: np.ndarray  # (n, 4) float32: x0 y0 x1 y1 in pixels around what is visible of each object
    shapes: np.ndarray  # (n,) int64
    shown: np.ndarray  # (n,) float32: share of each object that no other one hides


class Clip(NamedTuple):
    """Moments of one scene."""

    frames: list[Frame]
    label: int  # motion of the large object


class Scenes:
    """A source of `count` scenes; any index works, so the set has no end. Splits never share a scene."""

    classes = SHAPES

    def __init__(self, count: int = 2048, size: int = 64, split: str = "train", seed: int = 0):
        if split not in SPLITS:
            raise DataError(f"the scenes have splits {', '.join(SPLITS)}; got {split!r}.")
        if size < 16 or count < 1:
            raise DataError(f"expected at least one scene of at least 16 px, got {count} of {size} px.")
        self.count, self.size, self.split, self.seed = count, size, split, seed
        self.labels = np.arange(count, dtype=np.int64) % len(SHAPES)  # balanced; the loader shuffles

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> Image.Image:
        return Image.fromarray(self.frame(index).image)

    def name(self, index: int) -> str:
        return f"scenes ({self.split}, seed {self.seed}), scene {index}"

    def frame(self, index: int) -> Frame:
        """Scene `index`, halfway through its clip."""
        return render(*self._scene(index), self.size)

    def clip(self, index: int, frames: int = 8) -> Clip:
        """Scene `index` at `frames` moments."""
        things, backdrop = self._scene(index)
        moments = np.linspace(0, 1, frames)
        return Clip([render(things, backdrop, self.size, moment) for moment in moments], things[0].motion)

    def _scene(self, index: int) -> tuple[list[Thing], Backdrop]:
        dice = np.random.default_rng([self.seed, SPLITS[self.split], index])
        light = dice.uniform(0.1, 0.9)  # how bright the backdrop is; objects stand out from it
        backdrop = Backdrop(np.clip(light + dice.uniform(-0.15, 0.15, 3), 0, 1), dice.uniform(-1, 1, (3, 4, 4)))
        large = _thing(dice, index % len(SHAPES), dice.uniform(0.24, 0.4), light)
        shapes = dice.integers(len(SHAPES), size=dice.integers(4))
        return [large] + [_thing(dice, int(shape), dice.uniform(0.05, 0.1), light) for shape in shapes], backdrop


def _thing(dice: np.random.Generator, shape: int, radius: float, light: float) -> Thing:
    room = SIDE - radius
    away = dice.uniform(0.35, 0.6) * (1 if light < 0.5 else -1)
    ink = light + away + dice.uniform(-0.2, 0.2, 3)
    return Thing(
        shape=shape,
        motion=int(dice.integers(len(MOTIONS))),
        centre=dice.uniform(-room, room, 2),
        radius=radius,
        turn=dice.uniform(0, 2 * np.pi),
        inks=np.clip([ink, ink + dice.uniform(-0.2, 0.2, 3)], 0, 1),
        stripes=float(dice.choice([0.0, 0.0, 1.5, 2.5])),
        slant=dice.uniform(0, 2 * np.pi),
        speed=dice.uniform(0.6, 1.0),
    )


def render(things: list[Thing], backdrop: Backdrop, size: int, moment: float = 0.5) -> Frame:
    """Draw from the backdrop forward: small objects first, the large one in front of them."""
    axis = ((np.arange(size) + 0.5) / size - SIDE).astype(np.float32)
    x, y = np.meshgrid(axis, axis)
    canvas = _behind(backdrop, axis)  # (H, W, 3)
    instances = np.zeros((size, size), np.uint8)
    whole = np.zeros(len(things), np.float32)  # pixels of each object, hidden or not
    for number, thing in reversed(list(enumerate(_moved(thing, moment) for thing in things))):
        here = _around(thing, size)
        cover, paint = _paint(thing, x[here], y[here], 1 / size)
        canvas[here] += cover[..., None] * (paint - canvas[here])
        instances[here][cover > 0.5] = number + 1
        whole[number] = (cover > 0.5).sum()
    visible = [number for number in range(len(things)) if (instances == number + 1).sum() >= 4]
    renumber = np.zeros(len(things) + 1, np.uint8)  # what peeps out with less than four pixels is left out
    renumber[[number + 1 for number in visible]] = np.arange(len(visible)) + 1
    instances = renumber[instances]
    boxes = np.array([_box(instances == number + 1) for number in range(len(visible))], np.float32).reshape(-1, 4)
    shapes = np.array([things[number].shape for number in visible], np.int64)
    shown = np.array([(instances == i + 1).sum() / whole[number] for i, number in enumerate(visible)], np.float32)
    mask = np.concatenate([[0], shapes + 1]).astype(np.uint8)[instances]
    image = (np.clip(canvas, 0, 1) * 255 + 0.5).astype(np.uint8)
    return Frame(image, things[0].shape, mask, instances, boxes, shapes, shown)


def _moved(thing: Thing, moment: float) -> Thing:
    """The object at `moment` (0 to 1) of its clip; it is where it was placed halfway."""
    way = thing.speed * (moment - 0.5)
    steps = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}
    motion = MOTIONS[thing.motion]
    if motion in steps:
        return thing._replace(centre=thing.centre + 0.4 * way * np.array(steps[motion]))
    if motion in ("clockwise", "counterclockwise"):  # y points down, so a growing angle turns clockwise
        return thing._replace(turn=thing.turn + (1 if motion == "clockwise" else -1) * way * np.pi / 2)
    if motion in ("growing", "shrinking"):
        return thing._replace(radius=thing.radius * 2 ** (way if motion == "growing" else -way))
    return thing


def _around(thing: Thing, size: int) -> tuple[slice, slice]:
    """Rows and columns that hold the whole object: no shape reaches beyond 1.3 radii, and edges are a pixel soft."""
    reach = 1.3 * thing.radius * size + 1
    middle = (thing.centre + SIDE) * size
    first, last = np.clip([np.floor(middle - reach), np.ceil(middle + reach)], 0, size).astype(int)
    return slice(first[1], last[1]), slice(first[0], last[0])


def _behind(backdrop: Backdrop, axis: np.ndarray) -> np.ndarray:
    """The backdrop, (H, W, 3). The sine of a sum is two products, so sines are taken along the axes alone."""
    along, across, phase, height = np.moveaxis(backdrop.waves, 2, 0)[..., None].astype(np.float32)  # (3, 4, 1) each
    columns, rows = 14 * along * axis + 6 * phase, 14 * across * axis  # (3, 4, size)
    waves = [(height * np.cos(rows), np.sin(columns)), (height * np.sin(rows), np.cos(columns))]
    canvas = sum(down.swapaxes(1, 2) @ right for down, right in waves)  # (3, H, W)
    return np.ascontiguousarray((0.06 * canvas + backdrop.base[:, None, None].astype(np.float32)).transpose(1, 2, 0))


def _paint(thing: Thing, x: np.ndarray, y: np.ndarray, pixel: float) -> tuple[np.ndarray, np.ndarray]:
    """Coverage (H, W) with soft edges, and colour (H, W, 3) of one object."""
    cos, sin = float(np.cos(thing.turn)), float(np.sin(thing.turn))  # Python's own keep arrays in single precision
    (left, top), radius = thing.centre.tolist(), float(thing.radius)
    u, v = (x - left) / radius, (y - top) / radius
    u, v = cos * u + sin * v, cos * v - sin * u
    inside = INSIDE[SHAPES[thing.shape]](u, v)
    cover = np.clip(inside * (radius / pixel) + 0.5, 0, 1)
    along = float(np.cos(thing.slant)) * u + float(np.sin(thing.slant)) * v
    mix = (np.sin(2 * np.pi * thing.stripes * along) > 0) if thing.stripes else np.zeros_like(along)
    inks = thing.inks.astype(np.float32)
    paint = inks[0] + mix[..., None].astype(np.float32) * (inks[1] - inks[0])
    return cover, paint * (0.85 + 0.15 * along[..., None])


def _polygon(u: np.ndarray, v: np.ndarray, sides: int) -> np.ndarray:
    """Distance to the nearest side of a regular polygon with corners at radius 1."""
    step = 2 * np.pi / sides
    angle = (np.arctan2(v, u) + np.pi) % step - step / 2
    return np.cos(np.pi / sides) - np.hypot(u, v) * np.cos(angle)


def _star(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    step = 2 * np.pi / 5
    angle = np.abs((np.arctan2(v, u) + np.pi) % step - step / 2)  # 0 at a notch, step/2 at a tip
    p, q = np.hypot(u, v) * np.cos(angle), np.hypot(u, v) * np.sin(angle)
    notch, tip = np.array([0.4, 0.0]), np.array([np.cos(step / 2), np.sin(step / 2)])
    side = tip - notch
    return (side[0] * q - side[1] * (p - notch[0])) / np.hypot(*side)


def _heart(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """A square on its corner, with a disc on each of its upper sides."""
    half = 0.5
    a, b = (u + v + 0.15) * np.sqrt(0.5), (v - u + 0.15) * np.sqrt(0.5)
    square = half - np.maximum(np.abs(a), np.abs(b))
    return np.maximum(square, half - np.minimum(np.hypot(a + half, b), np.hypot(a, b + half)))


# How far a point lies inside each shape, in radii; positive within.
INSIDE = {
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


def _box(mask: np.ndarray) -> tuple[float, float, float, float]:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)
