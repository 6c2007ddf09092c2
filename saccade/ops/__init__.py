"""Fused operations: each a reference in plain PyTorch and, where it pays, a Triton kernel (or a cuDNN, oneDNN call).

Models call them unconditionally; `_dispatch` decides which implementation runs, `_launch` launches kernels.
"""

from saccade.ops._dispatch import REGISTRY, disabled, enabled, interpreted
from saccade.ops.conv import conv_act_norm, conv_norm_act
from saccade.ops.depthwise import depthwise_conv, depthwise_gelu
from saccade.ops.layer_norm import add, add_prenorm, bias_norm, channel_norm, prenorm
from saccade.ops.linear import grouped_linear, linear_gelu
from saccade.ops.pixel_pooling import pixel_softmax, pool_pixels

__all__ = [
    "REGISTRY",
    "add",
    "add_prenorm",
    "bias_norm",
    "channel_norm",
    "conv_act_norm",
    "conv_norm_act",
    "depthwise_conv",
    "depthwise_gelu",
    "disabled",
    "enabled",
    "grouped_linear",
    "interpreted",
    "linear_gelu",
    "pixel_softmax",
    "pool_pixels",
    "prenorm",
]
