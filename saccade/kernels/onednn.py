"""oneDNN's depth-wise convolution for inference on CPUs: GELU inside, and the sum as a 1 on the middle tap."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from saccade import kernels

AVAILABLE = torch.backends.mkldnn.is_available() and all(
    hasattr(torch.ops.mkldnn, name) for name in ("_convolution_pointwise",)
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


def depthwise(features: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, shortcut: bool) -> Tensor:
    """features (B, C, H, W), channels-last -> x + conv(x), or conv(x) without the shortcut, through a GELU if asked."""
    if shortcut:
        weight = weight.clone()
        weight[:, :, 1, 1] += 1
    what = ("gelu", [], "none") if gelu else ("none", [], "")
    groups = features.shape[1]
    return torch.ops.mkldnn._convolution_pointwise(features, weight, bias, [1, 1], [1, 1], [1, 1], groups, *what)
