"""A video -> clips: which frames, cut how. Uint8 tensors (3, T, S, S), or (V, 3, T, S, S) for several views.

A clip of one frame is a picture (3, S, S), for models of images.
"""

import random
from collections.abc import Callable, Sequence

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional as tv

from saccade.data.decode.video import Video
from saccade.data.loader import seed_all
from saccade.data.motion_loader import one_frame_is_a_picture


def clip_numbers(count: int, frames: int, stride: int, start: float = 0.5) -> list[int]:
    """Numbers of `frames` frames, `stride` apart, of a video of `count` frames (SF-63: 32 of 128, 4 apart).

    `start` goes from 0, the earliest clip, to 1, the latest. A video too short for the stride is spread over the
    clip evenly, with repeated frames if it must be.
    """
    room = count - 1 - (frames - 1) * stride
    if room < 0:
        return [i * count // frames for i in range(frames)]
    first = int(start * room + 0.5)
    return list(range(first, first + frames * stride, stride))


class TrainClip:
    """A random clip, every frame changed in the same way: the dice of `change` are thrown alike for all of them."""

    def __init__(self, frames: int, stride: int, change: Callable[[Image.Image], Tensor]):
        self.frames, self.stride, self.change = frames, stride, change

    def __call__(self, video: Video) -> Tensor:
        numbers = clip_numbers(len(video), self.frames, self.stride, random.random())
        throw = random.getrandbits(62)
        changed = []
        for frame in video.frames(numbers):
            seed_all(throw)
            changed.append(self.change(frame))
        return one_frame_is_a_picture(torch.stack(changed, dim=1))


class EvalClip:
    """The middle clip, cut at the centre; or `clips` in time, evenly spaced, times `crops` along the longer side.

    The shorter side is brought to size / crop_pct. Several views come as (V, 3, T, S, S), V = clips * crops, times
    slowest; 4 times 3 is the papers' protocol for video (SF-65).
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
        self.short, self.how = round(size / crop_pct), tv.InterpolationMode(interpolation)

    def __call__(self, video: Video) -> Tensor:
        views = [self.views(video, start) for start in spaced(self.clips)]
        return one_frame_is_a_picture(torch.cat(views) if self.clips * self.crops > 1 else views[0][0])

    def views(self, video: Video, start: float) -> Tensor:
        """One clip, cut at all places: (crops, 3, T, S, S)."""
        frames = video.frames(clip_numbers(len(video), self.frames, self.stride, start))
        return torch.stack([torch.stack(self.cut(frame)) for frame in frames], dim=2)

    def cut(self, frame: Image.Image) -> list[Tensor]:
        frame = tv.resize(frame, self.short, self.how)  # type: ignore[arg-type, assignment]
        left, top = frame.width - self.size, frame.height - self.size
        wide = frame.width >= frame.height
        places = [(x, 0.5) if wide else (0.5, x) for x in spaced(self.crops)]
        return [
            tv.pil_to_tensor(tv.crop(frame, round(y * top), round(x * left), self.size, self.size))  # type: ignore[arg-type]
            for x, y in places
        ]


def spaced(count: int) -> Sequence[float]:
    """`count` places from 0 to 1; a single one is the middle."""
    return [i / (count - 1) for i in range(count)] if count > 1 else [0.5]
