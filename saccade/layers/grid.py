"""Leaving and entering the grid: a map of vectors and the list of its pixels are the same memory.

Maps travel channels-last in memory, so that both directions are views and a LayerNorm or a linear layer over
channels reads contiguous rows.
"""

import torch
from torch import Tensor


def to_pixels(features: Tensor) -> Tensor:
    """features (B, C, H, W) -> pixels (B, N, C), row by row; a view when the map is channels-last."""
    return features.flatten(2).transpose(1, 2)


def to_features(pixels: Tensor, height: int, width: int) -> Tensor:
    """pixels (B, N, C) -> features (B, C, H, W), channels-last in memory; a view."""
    return pixels.transpose(1, 2).unflatten(2, (height, width))


def channels_last(features: Tensor) -> Tensor:
    """The same map with its channels adjacent in memory."""
    return features.contiguous(memory_format=torch.channels_last)


def check_images(images: Tensor, channels: int = 3, smallest: int = 1) -> None:
    """Name the mistake at the door, before a matmul ten layers down does."""
    if images.ndim == 4 and images.shape[1] == channels:
        if images.shape[2] < smallest or images.shape[3] < smallest:
            raise ValueError(
                f"expected images of at least {smallest} px a side, got {images.shape[2]} x {images.shape[3]}. "
                "Resize them first."
            )
        return
    hint = ""
    if images.ndim == 3 and images.shape[0] == channels:
        hint = " One image needs a batch axis: images[None]."
    elif images.shape[-1] == channels:
        hint = " This looks channels-last: images.movedim(-1, -3)."
    raise ValueError(f"expected images (B, {channels}, H, W), got {list(images.shape)}.{hint}")


def check_clips(clips: Tensor, channels: int = 3) -> None:
    """The same for clips: channels before time before rows and columns."""
    if clips.ndim == 5 and clips.shape[1] == channels:
        return
    hint = ""
    if clips.ndim == 4 and clips.shape[0] == channels:
        hint = " One clip needs a batch axis: clips[None]."
    elif clips.ndim == 4 and clips.shape[1] == channels:
        hint = " Images are clips of one frame: images[:, :, None]."
    elif clips.ndim == 5 and clips.shape[2] == channels:
        hint = " Time stands before the channels here: clips.transpose(1, 2)."
    elif clips.shape[-1] == channels:
        hint = " This looks channels-last: clips.movedim(-1, -4)."
    raise ValueError(f"expected clips (B, {channels}, T, H, W), got {list(clips.shape)}.{hint}")
