"""Video -> clips: temporal sampling and cropping. uint8 (3, T, S, S), or (V, 3, T, S, S) for several views.

A clip of one frame is an image (3, S, S), for image models.
"""

import random
from collections.abc import Callable, Sequence

import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms as tv

from saccade.data.decode.video import Video
from saccade.data.loader import seed_all


def clip_indices(count: int, frames: int, stride: int, start: float = 0.5) -> list[int]:
    """Indices of `frames` frames, `stride` apart, of a video of `count` frames.

    `start` in [0, 1] selects the earliest to the latest clip. A video that is too short for the stride is sampled
    uniformly, with repeated frames if necessary. SparseFormer uses 32 frames with stride 4 on Kinetics-400.
    """
    last_start = count - 1 - (frames - 1) * stride
    if last_start < 0:
        return [i * count // frames for i in range(frames)]
    first = int(start * last_start + 0.5)
    return list(range(first, first + frames * stride, stride))


class TrainClip:
    """A random clip. All frames get the same augmentation: `transform` runs with the same seed for each."""

    def __init__(self, frames: int, stride: int, transform: Callable[[Image.Image], Tensor]):
        self.frames, self.stride, self.transform = frames, stride, transform

    def __call__(self, video: Video) -> Tensor:
        indices = clip_indices(len(video), self.frames, self.stride, random.random())
        seed = random.getrandbits(62)
        frames = []
        for frame in video.frames(indices):
            seed_all(seed)
            frames.append(self.transform(frame))
        return squeeze_single_frame(torch.stack(frames, dim=1))


class EvalClip:
    """The middle clip with a centre crop; or `clips` uniformly spaced clips times `crops` crops along the longer side.

    The shorter side is resized to size / crop_pct. Several views are (V, 3, T, S, S) with V = clips * crops, crops
    varying fastest. 4 clips times 3 crops is the evaluation protocol of the video papers.
    """

    def __init__(
        self,
        size: int,
        frames: int,
        stride: int,
        crop_pct: float = 1.0,
        interpolation: str = "bicubic",
        clips: int = 1,
        crops: int = 1,
    ):
        self.size, self.frames, self.stride, self.clips, self.crops = size, frames, stride, clips, crops
        self.resize = tv.Resize(round(size / crop_pct), tv.InterpolationMode(interpolation))
        self.to_tensor = tv.PILToTensor()

    def __call__(self, video: Video) -> Tensor:
        views = [self.views(video, start) for start in spaced(self.clips)]
        return squeeze_single_frame(torch.cat(views) if self.clips * self.crops > 1 else views[0][0])

    def views(self, video: Video, start: float) -> Tensor:
        """One clip with all crops: (crops, 3, T, S, S)."""
        frames = video.frames(clip_indices(len(video), self.frames, self.stride, start))
        return torch.stack([torch.stack(self.crop(frame)) for frame in frames], dim=2)

    def crop(self, frame: Image.Image) -> list[Tensor]:
        """`crops` squares (3, S, S), from the left to the right or from the top to the bottom."""
        frame = self.resize(frame)
        margin_x, margin_y = frame.width - self.size, frame.height - self.size
        is_wide = frame.width >= frame.height
        crops = []
        for position in spaced(self.crops):
            x, y = (position, 0.5) if is_wide else (0.5, position)
            left, top = round(x * margin_x), round(y * margin_y)
            crops.append(self.to_tensor(frame.crop((left, top, left + self.size, top + self.size))))
        return crops


def spaced(count: int) -> Sequence[float]:
    """`count` positions from 0 to 1; a single one is 0.5."""
    return [i / (count - 1) for i in range(count)] if count > 1 else [0.5]


def squeeze_single_frame(clips: Tensor) -> Tensor:
    """clips (..., T, H, W) -> (..., H, W) if T is 1, so that image models can take them."""
    return clips.squeeze(-3) if clips.shape[-3] == 1 else clips
