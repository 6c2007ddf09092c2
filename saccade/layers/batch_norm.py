"""BatchNorm that learns in as few passes as can be, with what stands behind it; and what folding leaves of it."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from saccade.kernels import allowed, suits
from saccade.kernels import batch_norm as kernels


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
    if not isinstance(features, Tensor) or not norm.training or not torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling() or not plain(norm) or not suits(features) or not allowed("batch_norm"):
        return False
    if features.numel() <= features.shape[1]:  # one value a channel has no deviation: the library says so
        return False
    if shortcut is not None and (shortcut.dtype != features.dtype or shortcut.shape != features.shape):
        return False
    return all(in_rows(value) for value in (features, shortcut) if value is not None)


def plain(norm: nn.Module) -> bool:
    """Whether a norm is the library's in all its parts, and nobody listens to it."""
    if not isinstance(norm, _BatchNorm) or type(norm) not in (nn.BatchNorm1d, nn.BatchNorm2d):
        return False
    return norm.affine and norm.track_running_stats and norm.momentum is not None and not heard((norm,))


def heard(layers: Iterable[nn.Module]) -> bool:
    """Whether somebody listens to one of these: then it must be called itself."""
    return any(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks for layer in layers)


def in_rows(features: Tensor) -> bool:
    """Whether the channels of a place lie together: maps (B, C, H, W), lists (N, C)."""
    layout = torch.channels_last if features.ndim == 4 else torch.contiguous_format
    return features.ndim in (2, 4) and features.is_contiguous(memory_format=layout)


def fused_norm(
    norm: nn.Module, features: Tensor, relu: bool = False, shortcut: Tensor | None = None, gelu: bool = False
) -> Tensor:
    """A GELU, the norm, what is added to it, and ReLU in one; (B, C, H, W) or (N, C)."""
    norm.num_batches_tracked.add_(1)
    running = (norm.running_mean, norm.running_var)
    x, other = as_rows(features), None if shortcut is None else as_rows(shortcut)
    y = kernels.batch_norm(x, norm.weight, norm.bias, running, norm.momentum, norm.eps, relu, other, gelu)
    return as_map(y, features.shape)


def as_map(rows: Tensor, shape: torch.Size) -> Tensor:
    """rows (N, C) as what they were made of, (B, C, H, W) or (N, C)."""
    if len(shape) == 2:
        return rows
    batch, channels, height, width = shape
    return rows.view(batch, height, width, channels).permute(0, 3, 1, 2)


def as_rows(features: Tensor) -> Tensor:
    return features if features.ndim == 2 else features.permute(0, 2, 3, 1).flatten(0, 2)
