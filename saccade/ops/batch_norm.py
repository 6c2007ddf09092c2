"""Batch normalisation in training, with the activation and the sum around it."""

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
