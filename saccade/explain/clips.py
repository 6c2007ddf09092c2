"""Video input: a file, array or tensor becomes the model's input clip and larger frames to draw on."""

import os
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from saccade.data.decode.video import Video, VideoFile, VideoFrames
from saccade.data.transforms.clips import clip_indices
from saccade.explain.images import CANVAS_SIDES, input_size

ClipSource = str | os.PathLike | np.ndarray | Tensor | Video


class ClipView(NamedTuple):
    """One clip at two resolutions: the model's input and the frames to draw on."""

    name: str
    clip: Tensor  # (3, T, H, W) in [0, 1], before normalisation
    frames: np.ndarray  # (T, H', W', 3) uint8


def load_clip(source: Any, size: int, frames: int, stride: int, name: str = "") -> ClipView:
    """The middle clip of a video at about size x size pixels in its own aspect ratio.

    `source` is a file, a uint8 array (T, H, W, 3), a tensor (3, T, H, W) in [0, 1], or a `Video`.
    """
    video = _video(source)
    inputs, canvases = [], []
    for frame in video.frames(clip_indices(len(video), frames, stride)):
        height, width = input_size(frame.height, frame.width, size)
        scale = max(1.0, CANVAS_SIDES[0] / 2 / (height * width) ** 0.5)
        inputs.append(_fit(frame, height, width))
        canvases.append(_fit(frame, round(height * scale), round(width * scale)))
    clip = torch.from_numpy(np.stack(inputs)).permute(3, 0, 1, 2).float() / 255
    return ClipView(name, clip, np.stack(canvases))


def list_clips(clips: Any) -> list[Any]:
    """One clip or many as a list; an array or tensor with five axes is a batch."""
    if isinstance(clips, (np.ndarray, Tensor)):
        return list(clips) if clips.ndim == 5 else [clips]
    if isinstance(clips, (str, os.PathLike)) or hasattr(clips, "frames"):
        return [clips]
    return list(clips)


def _video(source: Any) -> Video:
    if isinstance(source, (str, os.PathLike)):
        return VideoFile(source)
    if isinstance(source, Tensor):
        pixels = source.detach().cpu().movedim(0, -1)
        source = (pixels if pixels.dtype == torch.uint8 else (pixels.clamp(0, 1) * 255).round().byte()).numpy()
    if isinstance(source, np.ndarray):
        if source.ndim != 4 or source.shape[3] != 3 or source.dtype != np.uint8 or not len(source):
            raise ValueError(
                "expected a uint8 clip (T, H, W, 3) or a tensor (3, T, H, W) in [0, 1], "
                f"got {source.dtype} {source.shape}."
            )
        return VideoFrames(source)
    if not hasattr(source, "frames"):
        raise ValueError(f"expected a video file, an array or a tensor, got {type(source).__name__}.")
    return source


def _fit(frame: Image.Image, height: int, width: int) -> np.ndarray:
    return np.array(ImageOps.fit(frame, (width, height), Image.Resampling.BICUBIC))
