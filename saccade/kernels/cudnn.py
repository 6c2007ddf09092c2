"""cuDNN's convolution with bias, sum and ReLU inside: what ends a ResNet block costs no pass over its map.

Behind a 1x1 convolution to many channels that pass takes longer than the convolution. For inference in half precision,
once the norm is folded into the weight.
"""

import torch
from torch import Tensor

MOST = 2**31  # values of a map; beyond, the library cuts the batch, which it does not do for these


def suits(features: Tensor, weight: Tensor, bias: Tensor | None, shortcut: Tensor | None = None) -> bool:
    """Whether cuDNN takes these: one half-precision type, channels last in memory, channels in eights."""
    if bias is None or not available(features):
        return False
    maps = (features,) if shortcut is None else (features, shortcut)
    alike = all(value.dtype == features.dtype for value in (*maps, weight, bias))
    half = alike and features.dtype in (torch.bfloat16, torch.float16)
    eights = weight.shape[0] % 8 == 0 and weight.shape[1] % 8 == 0
    small = max(weight.shape[:2]) * (features.numel() // features.shape[1]) < MOST
    return half and eights and small and all(value.is_contiguous(memory_format=torch.channels_last) for value in maps)


def available(features: Tensor) -> bool:
    """Whether cuDNN is there and wanted. Runs that must repeat exactly are left to the library, which asks it for that.

    AMD's library answers to the same names, and has not been tried.
    """
    there = features.is_cuda and torch.version.hip is None and torch.backends.cudnn.is_available()
    return there and torch.backends.cudnn.enabled and not torch.are_deterministic_algorithms_enabled()


def conv_relu(
    features: Tensor, weight: Tensor, bias: Tensor, stride: tuple[int, int], padding: tuple[int, int],
    dilation: tuple[int, int], shortcut: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """relu(conv(features) + bias + shortcut), (B, C, H, W) -> (B, D, H', W')."""
    if shortcut is None:
        return torch.cudnn_convolution_relu(features, weight, bias, stride, padding, dilation, 1)
    return torch.cudnn_convolution_add_relu(features, weight, shortcut, 1.0, bias, stride, padding, dilation, 1)
