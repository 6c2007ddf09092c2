"""Fused operations: each a reference in plain PyTorch and, where it pays, a Triton kernel (or a cuDNN, oneDNN call).

Models call them unconditionally; `_dispatch` decides which implementation runs, `_launch` launches kernels.
"""

from saccade.ops._dispatch import (
    REGISTRY,
    disabled,
    enabled,
    fixed_shapes,
    interpreted,
    plain_layer,
    record_implementations,
)
from saccade.ops._model_pass import model_pass
from saccade.ops.attention import self_attention
from saccade.ops.batch_norm import norm_act
from saccade.ops.conv import conv_norm_act
from saccade.ops.depthwise import depthwise_conv, depthwise_gelu
from saccade.ops.layer_norm import add, add_norm
from saccade.ops.linear import grouped_linear, linear_gelu
from saccade.ops.pooling import conv_norm_relu_pool, conv_pool_relu
from saccade.ops.roi_sampling import clamp_gradient, place_points, sample, sample_and_mix

__all__ = [
    "REGISTRY",
    "add",
    "add_norm",
    "clamp_gradient",
    "conv_norm_act",
    "conv_norm_relu_pool",
    "conv_pool_relu",
    "depthwise_conv",
    "depthwise_gelu",
    "disabled",
    "enabled",
    "fixed_shapes",
    "grouped_linear",
    "interpreted",
    "linear_gelu",
    "model_pass",
    "norm_act",
    "place_points",
    "plain_layer",
    "record_implementations",
    "sample",
    "sample_and_mix",
    "self_attention",
]
