"""Depth-wise convolutions with what stands around them: 3x3 with a sum and a GELU, wider ones with a GELU behind."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.kernels import allowed, in_type, learns, suits
from saccade.kernels import depthwise_wide as wide
from saccade.kernels.depthwise import depthwise, depthwise_twin
from saccade.layers.batch_norm import heard
from saccade.layers.residual import conv_act_norm, fits_inference
from saccade.ops._dispatch import compute_dtype, plain_layer
from saccade.ops._weights import cached_layout


@plain_layer
class DepthwiseConv(nn.Conv2d):
    """`act` is "", "pre" (y = gelu(x) + conv(gelu(x))) or "post" (y = gelu(x + conv(x))); `shortcut` keeps the sum."""

    def __init__(self, dim: int, act: str = "", shortcut: bool = True):
        super().__init__(dim, dim, 3, padding=1, groups=dim)
        self.act = act
        self.shortcut = shortcut

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> features (B, C, H, W)."""
        if torch.jit.is_scripting():
            return depthwise_twin(features, self.weight, self.bias, self.act, self.shortcut)
        else:
            return depthwise(features, self.weight, self.bias, self.act, self.shortcut)


def wide_conv_gelu(conv: nn.Conv2d, features: Tensor) -> Tensor:
    """gelu(conv(features)), features (B, C, H, W) -> (B, C, H, W); 5x5 and 7x7 by their kernel on a GPU."""
    if fits_wide(conv, features):
        weight, bias = conv.weight, conv.bias
        features = in_type(features, compute_dtype(features))
        taps = None
        if not torch.compiler.is_compiling() and not learns(features, weight, bias):
            taps = cached_layout(weight, "taps", lambda: wide.as_taps(weight))
        return wide.depthwise_wide(features, weight, bias, True, taps)
    return conv_act_norm(conv, features, "gelu") if fits_inference(features, (conv,), ()) else F.gelu(conv(features))


def fits_wide(conv: nn.Module, features: Tensor) -> bool:
    """Whether the kernel takes this: a plain depth-wise convolution that nobody listens to, channels last in memory."""
    if type(conv) is not nn.Conv2d or not isinstance(features, Tensor) or not suits(features):
        return False
    if not is_wide(conv) or heard((conv,)) or not allowed("depthwise_wide"):
        return False
    return features.is_contiguous(memory_format=torch.channels_last)


def is_wide(conv: nn.Conv2d) -> bool:
    """Whether a convolution is 5x5 or 7x7, depth-wise with a bias, and keeps the size of the map."""
    side = conv.kernel_size[0]
    layout = (conv.kernel_size, conv.stride, conv.dilation) == ((side, side), (1, 1), (1, 1))
    plain = conv.padding == (side // 2, side // 2) and conv.padding_mode == "zeros" and conv.bias is not None
    return side in wide.SIDES and layout and plain and conv.groups == conv.in_channels == conv.out_channels
