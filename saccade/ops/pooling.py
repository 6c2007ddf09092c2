"""Stems that end in max pooling."""

import torch.nn.functional as F
from torch import Tensor, nn


def conv_pool_relu_reference(images: Tensor, conv: nn.Module, norm: nn.Module) -> Tensor:
    """norm(relu(max_pool(conv(images)))), images (B, 3, H, W) -> (B, C, H/4, W/4); pooling 3x3 of stride 2."""
    return norm(F.relu(F.max_pool2d(conv(images), 3, stride=2, padding=1)))


conv_pool_relu = conv_pool_relu_reference
