"""The embedded set of motions: clips rendered from the bundled photographs, told apart by time alone.

A clip is a window that moves over a photograph (mirrored without end in every direction). Its class is how what it
shows moves: left, right, up, down, zoom in, zoom out, rotate (either way), still. No single frame says which: a
window's place is uniform on a plane that repeats, its angle on the circle, and the logarithm of its side on a circle
too. All motions leave such distributions as they are, so every frame of every class is drawn from the same one. The
price is that a zoom that leaves the range of sides goes on from its other end, with a cut, as a looped film would.

Rendering is one `grid_sample` a batch, on whatever device the photographs are.
"""

import math
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from saccade.data.decode.video import VideoFrames, write_video
from saccade.data.synthetic.photos import photo_paths

MOTIONS = ["left", "right", "up", "down", "zoom in", "zoom out", "rotate", "still"]
SPLITS = {"train": 0, "val": 1, "test": 2}
HELD_OUT = ("cat", "coffee")  # photographs that training never shows
SIDES = (0.35, 1.4)  # of a window, in photographs
FINE = 2  # samples along the side of a pixel, averaged


class Windows(NamedTuple):
    """What is seen of which photograph, frame by frame."""

    photo: Tensor  # (B,) int64
    centre: Tensor  # (B, T, 2) x y in photographs; they repeat, mirrored, without end
    side: Tensor  # (B, T) in photographs
    angle: Tensor  # (B, T) in radians, clockwise


def draw_windows(labels: Tensor, frames: int, photos: int, throws: Tensor) -> Windows:
    """labels (B,), throws (B, 7) uniform in [0, 1) -> the windows of B clips of `frames` frames.

    A throw decides photograph, place (2), angle, side, speed and the direction of a rotation.
    """
    photo, x, y, turn, size, speed, way = throws.unbind(1)
    moment = torch.linspace(-0.5, 0.5, frames, device=throws.device) if frames > 1 else throws.new_zeros(1)
    path = (0.5 + 0.5 * speed)[:, None] * moment  # (B, T): how far along the motion, symmetric in time

    def of(*names: str) -> Tensor:
        """(B, 1): 1 for clips of the first motion, -1 for those of the second, 0 for all others."""
        signs = [(labels == MOTIONS.index(name)).to(path) for name in names]
        return (signs[0] - signs[1] if len(signs) > 1 else signs[0])[:, None]

    rotation = of("rotate") * torch.where(way < 0.5, -1.0, 1.0)[:, None]
    angle = 2 * math.pi * turn[:, None] + rotation * path * (math.pi / 3)
    growth = of("zoom out", "zoom in") * path * math.log(2)
    low, high = math.log(SIDES[0]), math.log(SIDES[1])
    side = (low + (size[:, None] * (high - low) + growth) % (high - low)).exp()
    # The window moves against what is seen, along its own axes and in units of its own side.
    across, down = of("left", "right") * path * 0.6 * side, of("up", "down") * path * 0.6 * side
    cos, sin = angle.cos(), angle.sin()
    centre = torch.stack([cos * across - sin * down, sin * across + cos * down], dim=-1)
    centre = centre + 2 * torch.stack([x, y], dim=-1)[:, None]
    return Windows((photo * photos).long(), centre, side, angle)


def render(photos: Tensor, windows: Windows, size: int) -> Tensor:
    """photos (n, 3, R, R) in [0, 1] -> clips (B, 3, T, size, size), uint8."""
    batch, frames = windows.side.shape
    fine = FINE * size
    line = (torch.arange(fine, device=photos.device) + 0.5) / fine - 0.5
    y, x = torch.meshgrid(line, line, indexing="ij")  # (S, S) each, in windows
    cos = (windows.angle.cos() * windows.side)[..., None, None]  # (B, T, 1, 1)
    sin = (windows.angle.sin() * windows.side)[..., None, None]
    places = torch.stack([cos * x - sin * y, sin * x + cos * y], dim=-1) + windows.centre[:, :, None, None]
    grid = (2 * places - 1).reshape(batch, frames * fine, fine, 2)  # the frames of a clip, one below the other
    seen = F.grid_sample(photos[windows.photo], grid, padding_mode="reflection", align_corners=False)
    seen = F.avg_pool2d(seen, FINE).unflatten(2, (frames, size))  # (B, 3, T, H, W)
    return (seen * 255).round().clamp(0, 255).to(torch.uint8)


class MotionSet:
    """A source of `count` clips of `frames` frames, `size` px a side. Everything about clip i follows from (seed, i).

    Any index works, so the set has no end; splits share no clip, and training shares no photograph with the others.
    """

    classes = MOTIONS

    def __init__(self, count: int = 4096, size: int = 64, frames: int = 8, split: str = "train", seed: int = 0):
        if split not in SPLITS:
            raise ValueError(f"the motions have splits {', '.join(SPLITS)}; got {split!r}.")
        if size < 16 or count < 1 or frames < 1:
            raise ValueError(f"expected clips of at least 1 frame of 16 px, got {count} of {frames} of {size} px.")
        self.count, self.size, self.frames, self.split, self.seed = count, size, frames, split, seed
        self.labels = np.arange(count, dtype=np.int64) % len(MOTIONS)  # balanced; the loader shuffles
        names = [name for name in photo_paths() if (name in HELD_OUT) == (split != "train")]
        self.photos = load_photos(size, names)

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> VideoFrames:
        return VideoFrames(self.clips([index])[0].permute(1, 2, 3, 0).cpu().numpy())

    def name(self, index: int) -> str:
        return f"motions ({self.split}, seed {self.seed}), clip {index}"

    def to(self, device: torch.device | str) -> "MotionSet":
        """The same set, rendered on `device`."""
        moved = copy(self)
        moved.photos = self.photos.to(device)
        return moved

    def clips(self, indices: Sequence[int], dice: Sequence[int] | None = None) -> Tensor:
        """Clips (B, 3, T, S, S), uint8; with `dice`, other clips of the same classes, one for every throw."""
        places, first = np.asarray(indices), [self.seed, SPLITS[self.split]]
        drawn = np.zeros_like(places) if dice is None else np.asarray(dice)
        keys = np.column_stack([np.broadcast_to(first, (len(places), 2)), places, drawn])
        throws = torch.from_numpy(uniform(keys, 7))
        labels = torch.from_numpy(places % len(MOTIONS))
        windows = draw_windows(labels, self.frames, len(self.photos), throws)
        return render(self.photos, Windows(*(part.to(self.photos.device) for part in windows)), self.size)


def uniform(keys: np.ndarray, count: int) -> np.ndarray:
    """Integers (B, n) -> (B, count) float32 in [0, 1): the dice of every row, whichever rows are beside it.

    Splitmix64, thousands of times faster than a generator for each row.
    """
    state = np.zeros((len(keys), 1), np.uint64)
    for column in keys.astype(np.uint64).T:
        state = _stir(state ^ column[:, None])
    drawn = _stir(state + np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return ((drawn >> np.uint64(40)) * np.float32(2**-24)).astype(np.float32)


def _stir(values: np.ndarray) -> np.ndarray:
    """One round of splitmix64; whole numbers of 64 bits wrap around."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def write_motions(folder: str | Path, clips: int = 64, size: int = 64, frames: int = 16, seed: int = 0) -> None:
    """The set as MP4 files, folder/<split>/<class>/<number>.mp4: `clips` to train on, a quarter as many in val."""
    for split, count in (("train", clips), ("val", max(len(MOTIONS), clips // 4))):
        source = MotionSet(count, size, frames, split, seed)
        for index in range(count):
            path = Path(folder) / split / MOTIONS[source.labels[index]] / f"{index:05d}.mp4"
            write_video(path, source.read(index).pixels, fps=frames)


def load_photos(size: int, names: Sequence[str] | None = None) -> Tensor:
    """The bundled photographs (all, or those named) as (n, 3, R, R) in [0, 1]: squares, R = 3 * size at most."""
    paths = photo_paths()
    pictures = []
    for name in names or paths:
        with Image.open(paths[name]) as file:
            side = min(3 * size, *file.size)
            pictures.append(np.array(ImageOps.fit(file.convert("RGB"), (side, side), Image.Resampling.LANCZOS)))
    side = min(len(picture) for picture in pictures)
    alike = [Image.fromarray(picture).resize((side, side), Image.Resampling.LANCZOS) for picture in pictures]
    return torch.from_numpy(np.stack([np.array(picture) for picture in alike])).permute(0, 3, 1, 2).float() / 255
