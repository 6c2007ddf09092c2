"""Features (B, C, H, W) and pixels (B, N, C), views of the same memory, and checks of a model's input.

Features are channels-last in memory: both conversions are then views, and a LayerNorm or a linear layer over the
channels reads contiguous rows.
"""

import torch
from torch import Tensor


def to_pixels(features: Tensor) -> Tensor:
    """features (B, C, H, W) -> pixels (B, N, C), row by row; a view if the features are channels-last."""
    return features.flatten(2).transpose(1, 2)


def to_features(pixels: Tensor, height: int, width: int) -> Tensor:
    """pixels (B, N, C) -> features (B, C, H, W), channels-last in memory; a view."""
    return pixels.transpose(1, 2).unflatten(2, (height, width))


def channels_last(features: Tensor) -> Tensor:
    """The same features in channels-last memory format."""
    return features.contiguous(memory_format=torch.channels_last)


def check_images(images: Tensor, channels: int = 3) -> None:
    """Raise a ValueError that names what is wrong with the shape of images, expected as (B, channels, H, W)."""
    if images.ndim == 4 and images.shape[1] == channels:
        return
    hint = ""
    if images.ndim == 3 and images.shape[0] == channels:
        hint = " A single image needs a batch axis: images[None]."
    elif images.shape[-1] == channels:
        hint = " These are channels-last: images.movedim(-1, -3)."
    raise ValueError(f"expected images of shape (B, {channels}, H, W), got {tuple(images.shape)}.{hint}")


def check_clips(clips: Tensor, channels: int = 3) -> None:
    """Raise a ValueError that names what is wrong with the shape of clips, expected as (B, channels, T, H, W)."""
    if clips.ndim == 5 and clips.shape[1] == channels:
        return
    hint = ""
    if clips.ndim == 4 and clips.shape[0] == channels:
        hint = " A single clip needs a batch axis: clips[None]."
    elif clips.ndim == 4 and clips.shape[1] == channels:
        hint = " Images are clips of one frame: images[:, :, None]."
    elif clips.ndim == 5 and clips.shape[2] == channels:
        hint = " Time comes before the channels here: clips.transpose(1, 2)."
    elif clips.shape[-1] == channels:
        hint = " These are channels-last: clips.movedim(-1, -4)."
    raise ValueError(f"expected clips of shape (B, {channels}, T, H, W), got {tuple(clips.shape)}.{hint}")
