"""What a norm answers is kept for backward by every layer that reads it, though it costs one pass to compute again.

Here it is forgotten, and computed again, once, when backward first asks for it. On GPUs, where memory is what training
runs out of first.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from saccade.kernels import batch_norm as batch_norms
from saccade.kernels import layer_norm as layer_norms
from saccade.kernels import learns, suits
from saccade.layers.batch_norm import heard, learns_fused
from saccade.layers.norm import ChannelNorm, fits_map
from saccade.ops._dispatch import is_plain
from saccade.ops.mlp import TrainableNorm, train_conv_mlp, trains_fused


def normed_into(norm: nn.Module, part: Callable, features: Tensor, *rest: Any) -> Any:
    """part(norm(features), *rest); what the norm answers, features (B, C, H, W), is not kept for backward."""
    if hasattr(part, "act_outside") and not rest and is_plain(part) and trains_fused(features, part):
        learning = norm_learns(norm, features)
        if learning is not None:
            return train_conv_mlp(features, part, norm, learning)
    normed, again = norm_again(norm, features)
    with nullcontext() if again is None else forgotten(normed, again):
        return part(normed, *rest)


def norm_again(norm: nn.Module, features: Tensor) -> tuple[Tensor, Callable[[], Tensor] | None]:
    """norm(features), and a function that computes it once more where that is cheap."""
    if type(norm) is nn.BatchNorm2d and learns_fused(norm, features):
        return batch_norm_again(norm, features)
    if not isinstance(features, Tensor) or torch.compiler.is_compiling():
        return norm(features), None
    if type(norm) is ChannelNorm and not heard((norm,)) and suits(features) and learns(features, norm.weight):
        normed, fixed = norm(features), features.detach()
        return normed, lambda: without_gradients(norm, fixed)
    return norm(features), None


def norm_learns(norm: nn.Module, features: Tensor) -> TrainableNorm | None:
    """The norm as a step of a larger function that learns, where it can be one."""
    if type(norm) is nn.BatchNorm2d and learns_fused(norm, features):
        running = norm.running_mean, norm.running_var
        return batch_norms.Learning(running, norm.momentum, norm.eps, norm.num_batches_tracked)
    if type(norm) is ChannelNorm and not heard((norm,)) and fits_map(features):
        return layer_norms.Learning(norm.eps)
    return None


def batch_norm_again(norm: nn.Module, features: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    running, seen = (norm.running_mean, norm.running_var), norm.num_batches_tracked
    return batch_norms.batch_norm_again(features, norm.weight, norm.bias, running, norm.momentum, norm.eps, seen)


@torch.no_grad()
def without_gradients(norm: nn.Module, features: Tensor) -> Tensor:
    return norm(features)


def forgotten(output: Tensor, again: Callable[[], Tensor]) -> torch.autograd.graph.saved_tensors_hooks:
    """A context in which nobody keeps `output` for backward: they get what `again()` gives, computed once for all.

    Views of the whole of it count as itself. `output` must live as long as the context does.
    """
    place, size = output.data_ptr(), output.numel()
    waiting, known = [0], []

    def pack(kept: Tensor) -> Tensor | tuple:
        if kept.numel() != size or kept.data_ptr() != place:
            return kept
        waiting[0] += 1
        return kept.shape, kept.stride()

    def unpack(kept: Tensor | tuple) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        value = known.pop() if known else again()
        waiting[0] -= 1
        if waiting[0] > 0:
            known.append(value)
        return value.as_strided(*kept)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
