"""Batch normalisation in training, with the activation and the sum around it."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS = {"": lambda x: x, "relu": F.relu, "gelu": F.gelu, "silu": F.silu}


def norm_act_reference(
    features: Tensor, norm: nn.Module, shortcut: Tensor | None = None, act: str = "", pre_act: str = ""
) -> Tensor:
    """act(norm(pre_act(features)) + shortcut), features (B, C, H, W) or (N, C); activations by name."""
    features = norm(ACTIVATIONS[pre_act](features))
    return ACTIVATIONS[act](features if shortcut is None else features + shortcut)


norm_act = norm_act_reference


def trainable_batch_norm(norm: nn.Module, features: Tensor) -> Any:  # TODO merge: replaced by the kernels' own file
    from importlib import import_module

    kernels, layers = import_module("saccade.kernels.batch_norm"), import_module("saccade.layers.batch_norm")
    if type(norm) is not nn.BatchNorm2d or not layers.learns_fused(norm, features):
        return None
    return kernels.Learning((norm.running_mean, norm.running_var), norm.momentum, norm.eps, norm.num_batches_tracked)
