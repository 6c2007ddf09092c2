"""Images as users pass them: paths, Pillow images, arrays and tensors, one or many."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from saccade._extras import printable
from saccade.data.decode.files import list_files
from saccade.data.decode.image import BadImage, read_image, to_rgb
from saccade.data.decode.urls import Location, is_url, read_bytes
from saccade.data.decode.video import (
    Video,
    VideoFile,
    VideoFrame,
    VideoFrames,
    is_video_file,
    list_frames,
    middle_frame,
)

ImageInput = str | os.PathLike | Image.Image | np.ndarray | Tensor
VideoInput = str | os.PathLike | np.ndarray | Tensor | Video


class Input(NamedTuple):
    """One image to predict; `decode` reads it."""

    id: int  # position in the source
    name: str  # for messages and results
    content: bytes | str | Location | BadImage  # bytes, path or URL, part of a file, or why there is none

    def decode(self, max_side: int | None = None) -> Image.Image:
        """RGB image; raises `BadImage` with a reason in one line."""
        if isinstance(self.content, BadImage):
            raise self.content
        content = self.content
        if isinstance(content, Location):
            try:
                content = read_bytes(content)
            except OSError as error:
                raise BadImage(self.name, error) from error
        return read_image(content, self.name, max_side)


def list_inputs(inputs: Any, videos: bool = False, every: float = 1.0) -> list[Any]:
    """One input or many as a list. Folders become their images (or videos), a batch its members.

    Arrays and tensors with one axis more than an image (or clip) are batches. Where images are expected, a video file
    becomes its frames at intervals of `every` seconds.
    """
    if isinstance(inputs, (np.ndarray, Tensor)):
        return list(inputs) if inputs.ndim == (5 if videos else 4) else [inputs]
    if isinstance(inputs, (str, os.PathLike)):
        return _list_path(inputs, videos, every)
    # A Pillow image, a `Video`, an input that is listed already, or what reading will refuse.
    if isinstance(inputs, (Image.Image, Input, VideoFrame)) or hasattr(inputs, "frames"):
        return [inputs]
    if not isinstance(inputs, Iterable):
        return [inputs]
    listed: list[Any] = []
    for entry in inputs:
        listed += _list_path(entry, videos, every) if isinstance(entry, (str, os.PathLike)) else [entry]
    return listed


def _list_path(path: str | os.PathLike, videos: bool, every: float) -> list[Any]:
    if not videos and is_video_file(path):
        try:
            return list_frames(path, every)
        except (BadImage, OSError):
            return [path]  # reading it says what is wrong
    return list_files(Path(path), videos) if not is_url(path) and Path(path).is_dir() else [path]


def input_name(source: Any) -> str:
    """File name of a path, "image" for anything else."""
    if isinstance(source, (Input, VideoFrame)):
        return source.name
    return printable(Path(source).name) if isinstance(source, (str, os.PathLike)) else "image"


def read_input(source: ImageInput | Input, max_side: int | None = None) -> Image.Image:
    """The input as an 8-bit RGB image, with sides of at most `max_side`; a ValueError says what is wrong with it."""
    if isinstance(source, Input):
        return source.decode(max_side)
    if isinstance(source, VideoFrame):
        source = source.decode()
    if is_video_file(source):
        source = middle_frame(VideoFile(source))  # type: ignore[arg-type] # a path
    if isinstance(source, (str, os.PathLike)):
        return read_image(source if is_url(source) else Path(source), max_side=max_side)
    if isinstance(source, Tensor):
        source = _tensor_to_array(source)
    if isinstance(source, np.ndarray):
        source = _array_to_image(source)
    if not isinstance(source, Image.Image):
        raise ValueError(f"expected a path, a Pillow image, an array or a tensor, got {type(source).__name__}.")
    image = to_rgb(source.copy())
    if max_side is not None:
        image.thumbnail((max_side, max_side), Image.Resampling.BICUBIC)
    return image


def read_video_input(source: Any) -> Video:
    """A file, a uint8 array (T, H, W, 3), a tensor (3, T, H, W) in [0, 1] or a `Video` as a `Video`."""
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


def _tensor_to_array(image: Tensor) -> np.ndarray:
    image = image.detach().cpu()
    if image.ndim == 3 and image.shape[0] in (1, 3):
        image = image.permute(1, 2, 0)
    return image.numpy() if image.dtype == torch.uint8 else image.float().numpy()


def _array_to_image(image: np.ndarray) -> Image.Image:
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[..., 0]
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (3, 4)) or image.size == 0:
        raise ValueError(f"expected an image (H, W), (H, W, 3) or a tensor (3, H, W), got {image.shape}.")
    if image.dtype != np.uint8:
        if not np.isfinite(image).all() or image.min() < 0 or image.max() > 1:
            raise ValueError(
                f"expected values in [0, 1] (or uint8), got {image.min():.3g} to {image.max():.3g}. "
                "Pass the image before normalisation: the model's own mean and std are applied here."
            )
        image = np.round(image * 255).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(image))
