"""Video input: a file, array or tensor becomes the model's input clip and larger frames to draw on."""

from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from saccade.data.decode.inputs import read_video_input
from saccade.data.transforms.clips import EvalClip, clip_indices
from saccade.explanation.images import CANVAS_SIDES, input_size


class ClipView(NamedTuple):
    """One clip at two resolutions: the model's input and the frames to draw on."""

    name: str
    clip: Tensor  # (3, T, H, W) in [0, 1], before normalisation
    frames: np.ndarray  # (T, H', W', 3) uint8


def load_clip(
    source: Any, size: int, frames: int, stride: int, name: str = "", crop_pct: float | None = None
) -> ClipView:
    """The middle clip of a video at about size x size pixels in its own aspect ratio, or with `crop_pct` its centre.

    `source` is a file, a uint8 array (T, H, W, 3), a tensor (3, T, H, W) in [0, 1], or a `Video`.
    """
    video = read_video_input(source)
    inputs, canvases = [], []
    for frame in video.frames(clip_indices(len(video), frames, stride)):
        height, width = (size, size) if crop_pct else input_size(frame.height, frame.width, size)
        scale = max(1.0, CANVAS_SIDES[0] / 2 / (height * width) ** 0.5)
        inputs.append(_fit(frame, height, width))
        canvases.append(_fit(frame, round(height * scale), round(width * scale), crop_pct or 1.0))
    clip = torch.from_numpy(np.stack(inputs)).permute(3, 0, 1, 2).float() / 255
    if crop_pct:  # exactly what `saccade.predict` classifies
        clip = EvalClip(size, frames, stride, crop_pct)(video).view(3, frames, size, size).float() / 255
    return ClipView(name, clip, np.stack(canvases))


def _fit(frame: Image.Image, height: int, width: int, crop_pct: float = 1.0) -> np.ndarray:
    return np.array(ImageOps.fit(frame, (width, height), Image.Resampling.BICUBIC, bleed=(1 - crop_pct) / 2))
