"""cuDNN's convolution with bias, sum and ReLU inside: what ends a ResNet block costs no pass over its map.

Behind a 1x1 convolution to many channels that pass takes longer than the convolution. For inference in half precision,
once the norm is folded into the weight. Compilers take it as an operator they do not look into.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from saccade.kernels import HALVES

MOST = 2**31  # values of a map; beyond, the library cuts the batch, which it does not do for these
# AMD's library answers to the same names, and has not been tried. Asked once: compilers cannot follow the question.
THERE = torch.version.hip is None and torch.backends.cudnn.is_available()


def suits(features: Tensor, weight: Tensor, bias: Tensor | None, shortcut: Tensor | None = None) -> bool:
    """Whether cuDNN takes these: one half-precision type, channels last in memory, channels in eights."""
    if bias is None or weight.dtype != features.dtype or bias.dtype != features.dtype:
        return False
    if shortcut is not None and shortcut.dtype != features.dtype:
        return False
    maps = (features,) if shortcut is None else (features, shortcut)
    layout = all(value.is_contiguous(memory_format=torch.channels_last) for value in maps)
    return layout and suits_shape(features, weight)


def suits_shape(features: Tensor, weight: Tensor) -> bool:
    """Whether maps of this size, in this type, can go through a weight of this shape."""
    if features.dtype not in HALVES or not available(features):
        return False
    eights = weight.shape[0] % 8 == 0 and weight.shape[1] % 8 == 0
    return eights and max(weight.shape[:2]) * (features.numel() // features.shape[1]) < MOST


def available(features: Tensor) -> bool:
    """Whether cuDNN is there and wanted; runs that must repeat exactly are left to the library, which sees to that."""
    wanted = torch.backends.cudnn.enabled and not torch.are_deterministic_algorithms_enabled()
    return THERE and features.is_cuda and wanted


def conv_relu(
    features: Tensor, weight: Tensor, bias: Tensor, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], shortcut: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """relu(conv(features) + bias + shortcut), (B, C, H, W) -> (B, D, H', W')."""
    call = _op if torch.compiler.is_compiling() else _conv_relu
    return call(features, weight, bias, stride, padding, dilation, shortcut)


def _conv_relu(
    features: Tensor, weight: Tensor, bias: Tensor, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], shortcut: Tensor | None,
) -> Tensor:  # fmt: skip
    features = features.contiguous(memory_format=torch.channels_last)
    if shortcut is None:
        return torch.cudnn_convolution_relu(features, weight, bias, stride, padding, dilation, 1)
    shortcut = shortcut.contiguous(memory_format=torch.channels_last)
    return torch.cudnn_convolution_add_relu(features, weight, shortcut, 1.0, bias, stride, padding, dilation, 1)


_op = custom_op("saccade::conv_relu", _conv_relu, mutates_args=())


@_op.register_fake
def _(
    features: Tensor, weight: Tensor, bias: Tensor, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], shortcut: Tensor | None,
) -> Tensor:  # fmt: skip
    found = F.conv2d(features, weight, None, stride, padding, dilation)
    return torch.empty_like(found, memory_format=torch.channels_last)
