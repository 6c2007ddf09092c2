"""The MLP of a transformer block with a depth-wise convolution between its two linear layers."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.ops import _dispatch as dispatch
from saccade.ops._dispatch import register_op
from saccade.ops._rows import column_sum
from saccade.ops._weights import cast_to
from saccade.ops.depthwise import ACTS, depthwise_conv, depthwise_forward, depthwise_gradients
from saccade.ops.linear import HAS_ONEDNN, linear_gelu, linear_onednn, weight_gradient, without_autocast

CHUNK = 2**22  # bytes of the hidden layer that a CPU computes at a time


def conv_mlp_reference(features: Tensor, mlp: Any) -> Tensor:
    """fc2(conv(fc1(features))), features (B, C, H, W), mlp a `saccade.layers.mlp.ConvMlp`.

    On channels-last features every permute is a view. `act_outside`: dropout comes between GELU and convolution.
    """
    hidden = mlp.fc1(features.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # (B, hidden, H, W)
    if mlp.act_outside:
        hidden = mlp.conv(mlp.drop1(F.gelu(hidden)))
    else:
        hidden = mlp.drop1(mlp.conv(hidden))
    return mlp.drop2(mlp.fc2(mlp.norm(hidden.permute(0, 2, 3, 1)))).permute(0, 3, 1, 2)


# Eager training in half precision on a GPU: fc1, convolution and fc2 as one autograd function. As three functions they
# cost twice the CPU time, for which the GPU waits.


class _TrainConvMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight1: Tensor, bias1: Tensor, conv_weight: Tensor, conv_bias: Tensor,
        weight2: Tensor, bias2: Tensor, options: tuple,
    ) -> Tensor:  # fmt: skip
        act, shortcut, dtype = options
        batch, _, height, width = features.shape
        ctx.sizes, ctx.options = (batch, height, width), (act, shortcut, features.dtype)
        ctx.dtypes = weight1.dtype, bias1.dtype, weight2.dtype, bias2.dtype
        rows, weight1, bias1 = _to_rows(dispatch.cast(features, dtype)), *cast_to(dtype, weight1, bias1)
        hidden = F.linear(rows, weight1, bias1)
        mixed = depthwise_forward((*ctx.sizes, hidden.shape[1]), hidden, conv_weight, conv_bias, act, shortcut)
        weight2, bias2 = cast_to(dtype, weight2, bias2)
        ctx.save_for_backward(rows, weight1, hidden, conv_weight, conv_bias, mixed, weight2)
        return _to_features(F.linear(mixed, weight2, bias2), ctx.sizes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    @without_autocast
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight1, hidden, conv_weight, conv_bias, mixed, weight2 = ctx.saved_tensors
        act, shortcut, dtype = ctx.options
        weight1_dtype, bias1_dtype, weight2_dtype, bias2_dtype = ctx.dtypes
        g = _to_rows(g)
        g_fc2 = weight_gradient(g, mixed, weight2_dtype), dispatch.cast(column_sum(g), bias2_dtype)
        g, sizes = torch.mm(g, weight2), (*ctx.sizes, hidden.shape[1])
        g, *g_conv = depthwise_gradients(sizes, g, hidden, conv_weight, conv_bias, act, shortcut)
        g_fc1 = weight_gradient(g, rows, weight1_dtype), dispatch.cast(column_sum(g), bias1_dtype)
        g_x = None
        if ctx.needs_input_grad[0]:
            g_x = dispatch.cast(_to_features(torch.mm(g, weight1), ctx.sizes), dtype)
        return g_x, *g_fc1, *g_conv, *g_fc2, None


def _to_rows(features: Tensor) -> Tensor:
    """features (B, C, H, W) -> (B H W, C), a view where they are channels-last."""
    return features.permute(0, 2, 3, 1).reshape(-1, features.shape[1])


def _to_features(rows: Tensor, sizes: tuple[int, int, int]) -> Tensor:
    """rows (B H W, C) -> (B, C, H, W), channels-last."""
    return rows.view(*sizes, rows.shape[1]).permute(0, 3, 1, 2)


def _is_plain(mlp: Any) -> bool:
    """Whether the three layers are as built, with the activation in the convolution and nothing between them."""
    if mlp.act_outside or not isinstance(mlp.norm, nn.Identity) or not hasattr(mlp.conv, "act"):
        return False
    inactive = not mlp.drop1.p or not mlp.drop1.training
    return inactive and dispatch.is_plain(mlp.fc1, mlp.conv, mlp.fc2) and not dispatch.has_hooks(mlp.drop1, mlp.norm)


def _trains_fused(features: Tensor, mlp: Any) -> bool:
    """Whether this MLP trains in half precision on a GPU, in eager mode, with all its parameters."""
    if not dispatch.is_training() or dispatch.is_compiling() or not dispatch.on_gpu(features):
        return False
    if not dispatch.computes_in_half(features) or not _is_plain(mlp) or not dispatch.is_channels_last(features):
        return False
    for layer in (mlp.fc1, mlp.conv, mlp.fc2):
        if layer.bias is None or not layer.weight.requires_grad or not layer.bias.requires_grad:
            return False
    return True


@register_op("conv_mlp", reference=conv_mlp_reference, supports=_trains_fused, implementation="training")
def conv_mlp(features: Tensor, mlp: Any) -> Tensor:
    parameters = [parameter for layer in (mlp.fc1, mlp.conv, mlp.fc2) for parameter in (layer.weight, layer.bias)]
    options = ACTS[mlp.conv.act], mlp.conv.shortcut, dispatch.compute_dtype(features)
    return mlp.drop2(_TrainConvMlp.apply(features, *parameters, options))


def _supports_linear_gelu(features: Tensor, mlp: Any) -> bool:
    if dispatch.is_training() or dispatch.is_compiling() or not dispatch.on_gpu(features) or not _is_plain(mlp):
        return False
    is_half = mlp.conv.act == "pre" and dispatch.computes_in_half(features)
    return is_half and linear_gelu.implementation(features.permute(0, 2, 3, 1), mlp.fc1) != "reference"


@conv_mlp.add("linear_gelu", supports=_supports_linear_gelu)
def _conv_mlp_linear_gelu(features: Tensor, mlp: Any) -> Tensor:
    """Inference on a GPU with the GELU before the convolution: inside the product of fc1."""
    hidden = linear_gelu(features.permute(0, 2, 3, 1), mlp.fc1).permute(0, 3, 1, 2)  # (B, hidden, H, W)
    hidden = depthwise_conv(hidden, mlp.conv.weight, mlp.conv.bias, "", mlp.conv.shortcut)
    return mlp.drop2(mlp.fc2(hidden.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


def _supports_onednn(features: Tensor, mlp: Any) -> bool:
    return HAS_ONEDNN and dispatch.on_cpu_inference(features) and not mlp.training and _is_plain(mlp)


@conv_mlp.add("onednn", supports=_supports_onednn)
def _conv_mlp_onednn(features: Tensor, mlp: Any) -> Tensor:
    """Inference on a CPU: bias and GELU inside oneDNN's layers, and the hidden layer for as many images as caches hold.

    A tensor above 32 MB is new memory from the system at every call, which costs more than the arithmetic on it.
    """
    pixels = features.permute(0, 2, 3, 1)  # (B, H, W, C)
    fc1, conv, fc2 = mlp.fc1, mlp.conv, mlp.fc2
    act_first = conv.act == "pre"
    step = max(1, CHUNK // max(1, 4 * pixels.shape[1] * pixels.shape[2] * fc1.weight.shape[0]))
    output = torch.empty(*pixels.shape[:3], fc2.weight.shape[0])
    for i in range(0, pixels.shape[0], step):
        hidden = linear_onednn(pixels[i : i + step], fc1.weight, fc1.bias, gelu=act_first).permute(0, 3, 1, 2)
        hidden = depthwise_conv(hidden, conv.weight, conv.bias, "" if act_first else "post", conv.shortcut)
        output[i : i + step] = linear_onednn(hidden.permute(0, 2, 3, 1), fc2.weight, fc2.bias)
    return mlp.drop2(output.permute(0, 3, 1, 2))
