"""The embedded video dataset: clips rendered from the bundled photographs, whose class is visible in time only.

A clip is a window that moves over a photograph (mirrored periodically in both directions). Its class is the motion of
the content: left, right, up, down, zoom in, zoom out, rotate (either direction), still. No single frame is informative:
the position of a window is uniform on a periodic plane, its angle is uniform on the circle, and the logarithm of its
side is uniform on a circle too. All motions preserve these distributions, so the frames of all classes follow the same
one. As a consequence, a zoom that leaves the range of sides continues at the other end, with a cut.

Rendering is one `grid_sample` per batch, on the device of the photographs.
"""

import math
from collections.abc import Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from saccade.data.decode.image import read_image
from saccade.data.decode.video import VideoFrames, write_video
from saccade.data.loader import Batch, Order, eval_batches
from saccade.data.sources.base import DataError
from saccade.data.synthetic import SPLIT_SEEDS
from saccade.data.synthetic.photos import photo_paths
from saccade.data.transforms.clips import squeeze_single_frame

MOTIONS = ["left", "right", "up", "down", "zoom in", "zoom out", "rotate", "still"]
VAL_PHOTOS = ("cat", "coffee")  # not used for training
SIDE_RANGE = (0.35, 1.4)  # of a window, in units of the photograph's side
SUPERSAMPLING = 2  # samples per pixel along each axis
NUM_UNIFORMS = 7  # random numbers per clip, see `sample_windows`


class Windows(NamedTuple):
    """Photograph and window of every frame, in units of the photograph's side."""

    photo: Tensor  # (B,) int64
    centre: Tensor  # (B, T, 2) x y
    side: Tensor  # (B, T)
    angle: Tensor  # (B, T) in radians, clockwise


def sample_windows(labels: Tensor, frames: int, num_photos: int, uniforms: Tensor) -> Windows:
    """labels (B,), uniforms (B, 7) in [0, 1) -> the windows of B clips.

    The uniforms select photograph, x, y, angle, side, speed and the direction of a rotation.
    """
    photo, x, y, turn, size, speed, direction = uniforms.unbind(1)
    time = torch.linspace(-0.5, 0.5, frames, device=uniforms.device) if frames > 1 else uniforms.new_zeros(1)
    progress = (0.5 + 0.5 * speed)[:, None] * time  # (B, T), antisymmetric in time

    def indicator(positive: str, negative: str | None = None) -> Tensor:
        """(B, 1): 1 for clips of the class `positive`, -1 for `negative`, else 0."""
        sign = (labels == MOTIONS.index(positive)).to(progress)
        if negative is not None:
            sign = sign - (labels == MOTIONS.index(negative)).to(progress)
        return sign[:, None]

    rotation = indicator("rotate") * torch.where(direction < 0.5, -1.0, 1.0)[:, None]
    angle = 2 * math.pi * turn[:, None] + rotation * progress * (math.pi / 3)
    growth = indicator("zoom out", "zoom in") * progress * math.log(2)
    low, high = math.log(SIDE_RANGE[0]), math.log(SIDE_RANGE[1])
    side = (low + (size[:, None] * (high - low) + growth) % (high - low)).exp()
    # The window moves opposite to its content, along its own axes and in units of its own side.
    dx, dy = indicator("left", "right") * progress * 0.6 * side, indicator("up", "down") * progress * 0.6 * side
    cos, sin = angle.cos(), angle.sin()
    centre = torch.stack([cos * dx - sin * dy, sin * dx + cos * dy], dim=-1)
    centre = centre + 2 * torch.stack([x, y], dim=-1)[:, None]
    return Windows((photo * num_photos).long(), centre, side, angle)


def render_windows(photos: Tensor, windows: Windows, size: int) -> Tensor:
    """photos (n, 3, R, R) in [0, 1] -> clips (B, 3, T, size, size), uint8."""
    batch, frames = windows.side.shape
    samples = SUPERSAMPLING * size
    axis = (torch.arange(samples, device=photos.device) + 0.5) / samples - 0.5
    y, x = torch.meshgrid(axis, axis, indexing="ij")  # (S, S) each, in units of the window
    cos = (windows.angle.cos() * windows.side)[..., None, None]  # (B, T, 1, 1)
    sin = (windows.angle.sin() * windows.side)[..., None, None]
    points = torch.stack([cos * x - sin * y, sin * x + cos * y], dim=-1) + windows.centre[:, :, None, None]
    grid = (2 * points - 1).reshape(batch, frames * samples, samples, 2)  # the frames of a clip stacked vertically
    pixels = F.grid_sample(photos[windows.photo], grid, padding_mode="reflection", align_corners=False)
    pixels = F.avg_pool2d(pixels, SUPERSAMPLING).unflatten(2, (frames, size))  # (B, 3, T, H, W)
    return (pixels * 255).round().clamp(0, 255).to(torch.uint8)


class MotionSet:
    """`count` clips of `frames` frames of `size` px. Clip i is a function of (seed, split, i).

    Indices beyond `count` work too. Splits share no clip, and training shares no photograph with the other splits.
    """

    classes = MOTIONS

    def __init__(self, count: int = 4096, size: int = 64, frames: int = 8, split: str = "train", seed: int = 0):
        if split not in SPLIT_SEEDS:
            raise DataError(f"expected a split of {', '.join(SPLIT_SEEDS)}, got {split!r}.")
        if size < 16 or count < 1 or frames < 1:
            raise DataError(
                f"expected at least 1 clip of at least 1 frame of at least 16 px, "
                f"got {count} of {frames} frames of {size} px."
            )
        self.count, self.size, self.frames, self.split, self.seed = count, size, frames, split, seed
        self.labels = np.arange(count, dtype=np.int64) % len(MOTIONS)  # balanced; the loader shuffles
        names = [name for name in photo_paths() if (name in VAL_PHOTOS) == (split != "train")]
        self.photos = load_photos(size, names)

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> VideoFrames:
        return VideoFrames(self.clips([index])[0].permute(1, 2, 3, 0).cpu().numpy())

    def name(self, index: int) -> str:
        return f"motions ({self.split}, seed {self.seed}), clip {index}"

    def limited(self, count: int) -> "MotionSet":
        """A copy of the first `count` clips."""
        first = copy(self)
        first.count, first.labels = count, self.labels[:count]
        return first

    def to(self, device: torch.device | str) -> "MotionSet":
        """A copy that renders on `device`."""
        moved = copy(self)
        moved.photos = self.photos.to(device)
        return moved

    def clips(self, indices: Sequence[int], seeds: Sequence[int] | None = None) -> Tensor:
        """Clips (B, 3, T, S, S), uint8. Each value of `seeds` gives another clip of the same class."""
        clip_indices = np.asarray(indices)
        clip_seeds = np.zeros_like(clip_indices) if seeds is None else np.asarray(seeds)
        prefix = np.broadcast_to([self.seed, SPLIT_SEEDS[self.split]], (len(clip_indices), 2))
        keys = np.column_stack([prefix, clip_indices, clip_seeds])
        uniforms = torch.from_numpy(hash_uniform(keys, NUM_UNIFORMS))
        labels = torch.from_numpy(clip_indices % len(MOTIONS))
        windows = sample_windows(labels, self.frames, len(self.photos), uniforms)
        return render_windows(self.photos, Windows(*(part.to(self.photos.device) for part in windows)), self.size)


class MotionLoader:
    """Training batches rendered on the device of the photographs. No clip repeats: each has its own seed."""

    def __init__(self, source: MotionSet, order: Order):
        self.source, self.order = source, order

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        for keys in self.order.batches(epoch, start):
            seeds = [seed for _, seed in keys if seed is not None]
            yield _render_batch(self.source, [index for index, _ in keys], seeds)


class MotionEvalLoader:
    """Every clip once, in order. Process `rank` of `world_size` renders every `world_size`-th clip."""

    def __init__(self, source: MotionSet, batch_size: int, rank: int = 0, world_size: int = 1):
        self.source = source
        self.batches = eval_batches(len(source), batch_size, rank, world_size)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        for keys in self.batches:
            yield _render_batch(self.source, [index for index, _ in keys], None)


def _render_batch(source: MotionSet, indices: list[int], seeds: Sequence[int] | None) -> Batch:
    index = torch.tensor(indices)
    labels = torch.from_numpy(source.labels)[index].to(source.photos.device)
    return Batch(squeeze_single_frame(source.clips(indices, seeds)), labels, index, [])


def hash_uniform(keys: np.ndarray, count: int) -> np.ndarray:
    """Integers (B, n) -> (B, count) float32 in [0, 1); each row depends on its own key only.

    Splitmix64, thousands of times faster than one numpy generator per row.
    """
    state = np.zeros((len(keys), 1), np.uint64)
    for column in keys.astype(np.uint64).T:
        state = _splitmix64(state ^ column[:, None])
    bits = _splitmix64(state + np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return ((bits >> np.uint64(40)) * np.float32(2**-24)).astype(np.float32)


def _splitmix64(values: np.ndarray) -> np.ndarray:
    """One round, modulo 2**64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def write_motions(folder: str | Path, clips: int = 64, size: int = 64, frames: int = 16, seed: int = 0) -> None:
    """Write folder/<split>/<class>/<index>.mp4: `clips` for training, a quarter as many for validation."""
    for split, count in (("train", clips), ("val", max(len(MOTIONS), clips // 4))):
        source = MotionSet(count, size, frames, split, seed)
        for index in range(count):
            path = Path(folder) / split / MOTIONS[source.labels[index]] / f"{index:05d}.mp4"
            write_video(path, source.read(index).pixels, fps=frames)


def load_photos(size: int, names: Sequence[str] | None = None) -> Tensor:
    """The bundled photographs (all, or `names`), cropped to squares: (n, 3, R, R) in [0, 1], R at most 3 * size."""
    paths = photo_paths()
    images = []
    for name in names or paths:
        photo = read_image(paths[name])
        side = min(3 * size, *photo.size)
        images.append(ImageOps.fit(photo, (side, side), Image.Resampling.LANCZOS))
    side = min(image.width for image in images)
    resized = [np.array(image.resize((side, side), Image.Resampling.LANCZOS)) for image in images]
    return torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2).float() / 255
