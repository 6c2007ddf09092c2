"""BatchNorm that learns in as few passes as can be, with what stands behind it; and what folding leaves of it."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from saccade.kernels import batch_norm as kernels
from saccade.kernels import suits
from saccade.ops._dispatch import plain_layer


@plain_layer
class ChannelAffine(nn.Module):
    """gain · x + shift for every channel of a map (B, C, …) or of vectors (B, C)."""

    def __init__(self, gain: Tensor, shift: Tensor, axes: int):
        super().__init__()
        shape = (-1, *(1,) * axes)
        self.gain = nn.Parameter(gain.view(shape), requires_grad=False)
        self.shift = nn.Parameter(shift.view(shape), requires_grad=False)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, …) -> features (B, C, …)."""
        return torch.addcmul(self.shift, features, self.gain)


def norm_relu(norm: nn.Module, features: Tensor, shortcut: Tensor | None = None) -> Tensor:
    """relu(norm(features) + shortcut), fused where that suits."""
    if learns_fused(norm, features, shortcut):
        return fused_norm(norm, features, True, shortcut)
    features = norm(features)
    return F.relu(features if shortcut is None else features + shortcut)


def learns_fused(norm: nn.Module, features: Tensor, shortcut: Tensor | None = None) -> bool:
    """Whether the kernel takes this: a plain norm that learns, on a GPU, channels last in memory."""
    if not norm.training or not isinstance(features, Tensor) or not torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling() or not suits(features) or not plain(norm):
        return False
    if features.numel() <= features.shape[1]:  # one value a channel has no deviation: the library says so
        return False
    if shortcut is not None and (shortcut.dtype != features.dtype or shortcut.shape != features.shape):
        return False
    return in_rows(features) and (shortcut is None or in_rows(shortcut))


def plain(norm: nn.Module) -> bool:
    """Whether a norm is the library's in all its parts, and nobody listens to it."""
    if type(norm) not in (nn.BatchNorm1d, nn.BatchNorm2d):
        return False
    assert isinstance(norm, _BatchNorm)
    return norm.affine and norm.track_running_stats and norm.momentum is not None and not heard((norm,))


def heard(layers: Iterable[nn.Module]) -> bool:
    """Whether somebody listens to one of these: then it must be called itself."""
    for layer in layers:  # noqa: SIM110 (asked for every layer of every step: a generator takes longer)
        if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks:
            return True
    return False


def in_rows(features: Tensor) -> bool:
    """Whether the channels of a place lie together: maps (B, C, H, W), lists (N, C)."""
    if features.ndim == 4:
        return features.is_contiguous(memory_format=torch.channels_last)
    return features.ndim == 2 and features.is_contiguous()


def fused_norm(
    norm: nn.Module, features: Tensor, relu: bool = False, shortcut: Tensor | None = None, gelu: bool = False
) -> Tensor:
    """A GELU, the norm, what is added to it, and ReLU in one; (B, C, H, W) or (N, C)."""
    running, seen = (norm.running_mean, norm.running_var), norm.num_batches_tracked
    numbers = norm.weight, norm.bias, running, norm.momentum, norm.eps
    return kernels.batch_norm(features, *numbers, relu, shortcut, gelu, seen)
