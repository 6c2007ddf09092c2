"""Inference on CPUs: oneDNN's linear layers and convolutions with the activation inside, a few images at a time.

Eager PyTorch writes the bias of a linear layer as a pass of its own, and so the activation and the sum around a
depth-wise convolution; and a tensor of more than 32 MB is fresh memory from the system every time, which costs more
than the arithmetic on it (docs/dev/performance.md). Here the activation happens inside the layer, the sum is a 1 on
the middle tap of the kernel, and the wide hidden maps are made for so many images as the caches hold.

Only plain inference takes this path: float32 on a CPU, no gradient, no compiler, exporter or tracer at work.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from saccade import kernels

CHUNK = 2**22  # bytes of a hidden map that are worked on at once
AVAILABLE = torch.backends.mkldnn.is_available() and all(
    hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_convolution_pointwise")
)


def suits(features: Tensor) -> bool:
    """Whether this is plain inference on a CPU."""
    if not AVAILABLE or torch.is_grad_enabled() or not isinstance(features, Tensor) or features.is_cuda:
        return False
    if torch.compiler.is_compiling():
        return False
    plain = features.device.type == "cpu" and features.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    quiet = kernels._switch["on"] and torch.backends.mkldnn.enabled and not torch.jit.is_tracing()
    return plain and quiet and _get_current_dispatch_mode() is None


def linear(vectors: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool = False) -> Tensor:
    """vectors (…, C) -> (…, D), through a GELU if asked."""
    return torch.ops.mkldnn._linear_pointwise(
        vectors, weight, bias, *(("gelu", [], "none") if gelu else ("none", [], ""))
    )


def depthwise(features: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, shortcut: bool) -> Tensor:
    """features (B, C, H, W), channels-last -> x + conv(x), or conv(x) without the shortcut, through a GELU if asked."""
    if shortcut:
        weight = weight.clone()
        weight[:, :, 1, 1] += 1
    what = ("gelu", [], "none") if gelu else ("none", [], "")
    groups = features.shape[1]
    return torch.ops.mkldnn._convolution_pointwise(features, weight, bias, [1, 1], [1, 1], [1, 1], groups, *what)


def conv_mlp(
    features: Tensor,
    widen: tuple[Tensor, Tensor | None],
    conv: tuple[Tensor, Tensor | None],
    narrow: tuple[Tensor, Tensor | None],
    act_first: bool,
    shortcut: bool,
) -> Tensor:
    """features (B, C, H, W), channels-last -> (B, C, H, W): widen, depth-wise convolution, narrow; weights and biases.

    The GELU comes before the convolution (`act_first`) or behind it.
    """
    pixels = features.permute(0, 2, 3, 1)  # (B, H, W, C)
    height, width, hidden_dim = pixels.shape[1], pixels.shape[2], widen[0].shape[0]
    at_once = max(1, CHUNK // (4 * height * width * hidden_dim))
    out = torch.empty(*pixels.shape[:3], narrow[0].shape[0])
    for i in range(0, pixels.shape[0], at_once):
        hidden = linear(pixels[i : i + at_once], *widen, gelu=act_first).permute(0, 3, 1, 2)
        hidden = depthwise(hidden, *conv, gelu=not act_first, shortcut=shortcut).permute(0, 2, 3, 1)
        out[i : i + at_once] = linear(hidden, *narrow)
    return out.permute(0, 3, 1, 2)
