"""LayerNorm over channels, in the dtype of its input, and norms recomputed in backward."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def layer_norm_reference(tokens: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last axis of tokens (..., D), in their dtype; autocast would return float32."""
    if tokens.dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(tokens.device.type, enabled=False):
            return F.layer_norm(tokens, weight.shape, weight.to(tokens.dtype), bias.to(tokens.dtype), eps)
    return F.layer_norm(tokens, weight.shape, weight, bias, eps)


layer_norm = layer_norm_reference


def channel_norm_reference(features: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the channels of features (B, C, H, W)."""
    return layer_norm(features.permute(0, 2, 3, 1), weight, bias, eps).permute(0, 3, 1, 2)


channel_norm = channel_norm_reference


def prenorm_reference(norm: nn.Module, branch: Callable[..., Any], features: Tensor, *args: Any) -> Any:
    """branch(norm(features), *args), features (B, C, H, W)."""
    return branch(norm(features), *args)


prenorm = prenorm_reference


def add_prenorm_reference(
    features: Tensor, update: Tensor, norm: nn.Module, branch: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The sum of features and update (B, C, H, W), and branch(norm(sum))."""
    features = features + update
    return features, prenorm(norm, branch, features)


add_prenorm = add_prenorm_reference


def bias_norm_reference(pixels: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last axis of pixels + shift (C), pixels (B, H, W, C)."""
    return layer_norm(pixels + shift.to(pixels.dtype), weight, bias, eps)


bias_norm = bias_norm_reference


def is_channel_norm(norm: nn.Module) -> bool:
    """Whether this is a plain LayerNorm over the channels of (B, C, H, W), without hooks."""
    return False
