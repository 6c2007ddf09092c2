"""Stems that end in max pooling, and the weighted means that make tokens of pixels."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv_pool_relu_reference(images: Tensor, conv: nn.Module, norm: nn.Module) -> Tensor:
    """norm(relu(max_pool(conv(images)))), images (B, 3, H, W) -> (B, C, H/4, W/4); pooling 3x3 of stride 2."""
    return norm(F.relu(F.max_pool2d(conv(images), 3, stride=2, padding=1)))


conv_pool_relu = conv_pool_relu_reference


def pixel_softmax_reference(scores: Tensor) -> Tensor:
    """Softmax over the last axis of scores (B, M, N), in their dtype; autocast would return float32."""
    return scores.softmax(-1, dtype=scores.dtype)


pixel_softmax = pixel_softmax_reference


def pool_pixels_reference(assignment: Tensor, pixels: Tensor) -> Tensor:
    """assignment (B, M, N) @ pixels (B, N, C) -> tokens (B, M, C)."""
    return torch.bmm(assignment, pixels)


pool_pixels = pool_pixels_reference
