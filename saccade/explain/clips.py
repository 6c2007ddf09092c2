"""Videos in: a file, frames or a tensor becomes the clip that the model gets and the frames that we draw on."""

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from saccade.data.decode.video import Video, VideoFile, VideoFrames
from saccade.data.transforms.clips import clip_indices
from saccade.explain.images import DISPLAY, frame

Clip = str | os.PathLike | np.ndarray | Tensor | Video


class ClipView(NamedTuple):
    """One clip as the model gets it and as we draw it: the same frames at two resolutions."""

    name: str
    clip: Tensor  # (3, T, H, W) in [0, 1], what the model sees before normalisation
    pictures: np.ndarray  # (T, H', W', 3) uint8, for drawing


def load_clip(source: Clip, size: int, frames: int, stride: int, name: str = "") -> ClipView:
    """The middle clip of a video, whole frames at about size x size pixels in their own aspect.

    A video is a file, an array (T, H, W, 3) of uint8, or a tensor (3, T, H, W) in [0, 1].
    """
    video = _video(source)
    seen, drawn = [], []
    for picture in video.frames(clip_indices(len(video), frames, stride)):
        height, width = frame(picture.height, picture.width, size)
        scale = max(1.0, DISPLAY[0] / 2 / (height * width) ** 0.5)
        seen.append(_fit(picture, height, width))
        drawn.append(_fit(picture, round(height * scale), round(width * scale)))
    clip = torch.from_numpy(np.stack(seen)).permute(3, 0, 1, 2).float() / 255
    return ClipView(name, clip, np.stack(drawn))


def as_clips(clips: Clip | Iterable[Clip]) -> list[Clip]:
    """One clip or many; an array or tensor with five axes is a batch."""
    if isinstance(clips, (np.ndarray, Tensor)):
        return list(clips) if clips.ndim == 5 else [clips]
    if isinstance(clips, (str, os.PathLike)) or hasattr(clips, "frames"):
        return [clips]  # type: ignore[list-item]
    return list(clips)  # type: ignore[arg-type]


def _video(source: Any) -> Video:
    if isinstance(source, (str, os.PathLike)):
        return VideoFile(source)
    if isinstance(source, Tensor):
        pixels = source.detach().cpu().movedim(0, -1)
        source = (pixels if pixels.dtype == torch.uint8 else (pixels.clamp(0, 1) * 255).round().byte()).numpy()
    if isinstance(source, np.ndarray):
        if source.ndim != 4 or source.shape[3] != 3 or source.dtype != np.uint8 or not len(source):
            raise ValueError(
                f"expected a clip (T, H, W, 3) of uint8 or a tensor (3, T, H, W) in [0, 1]; got {source.shape}."
            )
        return VideoFrames(source)
    if not hasattr(source, "frames"):
        raise ValueError(f"expected a video file, an array or a tensor; got {type(source).__name__}.")
    return source


def _fit(picture: Image.Image, height: int, width: int) -> np.ndarray:
    from PIL import ImageOps

    return np.array(ImageOps.fit(picture, (width, height), Image.Resampling.BICUBIC))
