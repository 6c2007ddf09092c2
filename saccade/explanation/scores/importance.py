"""Importance of tokens for a class score: by gradient and by occlusion, both through gates on the tokens."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from saccade.explanation.hooks.gates import gated

Score = Callable[[Any], Tensor]  # model output -> (B,)


def class_score(class_index: int) -> Score:
    """Score function: the logit of one class; for dense logits (B, K, H, W), its mean over pixels."""

    def score(output: Any) -> Tensor:
        logits = class_logits(output)
        if not -logits.shape[1] <= class_index < logits.shape[1]:
            raise ValueError(f"expected a class below {logits.shape[1]}, got {class_index}.")
        return logits[:, class_index]

    return score


def class_logits(output: Any) -> Tensor:
    """Logits (B, K) of a classifier, or a segmenter's averaged over pixels; ValueError for other outputs."""
    if isinstance(output, Tensor) and output.ndim == 4:
        output = output.mean((2, 3))
    if not isinstance(output, Tensor) or output.ndim != 2 or output.shape[1] == 0:
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"expected class logits (B, K) or (B, K, H, W), got {shape}. Pass a score function.")
    return output


def gradient_importance(model: nn.Module, images: Tensor, score: Score, counts: Sequence[int]) -> list[Tensor]:
    """Derivative of the score by a factor on each token, (B, M) per recorded step, in one backward pass.

    `counts` are the numbers of tokens per step, in recorded order. Positive: the token supports the class.
    """
    gates = {
        step: torch.ones(len(images), count, device=images.device, requires_grad=True)
        for step, count in enumerate(counts)
    }
    with torch.enable_grad(), gated(model, gates):
        total = score(model(images)).sum()
        gradients = torch.autograd.grad(total, list(gates.values()), allow_unused=True)  # may recompute the forward
    return [
        torch.zeros_like(gate) if gradient is None else gradient
        for gate, gradient in zip(gates.values(), gradients, strict=True)
    ]


@torch.no_grad()
def occlusion_importance(
    model: nn.Module,
    image: Tensor,
    score: Score,
    step: int,
    count: int,
    batch_size: int = 16,
    tokens: Sequence[int] | None = None,
) -> Tensor:
    """Decrease of the score of one image (1, C, H, W), or clip, when each token of a step is set to zero: (M,).

    `count` is the step's number of tokens; `tokens` restricts the result to some of them, in their order.
    """
    baseline = score(model(image))
    drops = []
    occluded = torch.arange(count, device=image.device) if tokens is None else torch.tensor(tokens, device=image.device)
    for batch in occluded.split(batch_size):
        gates = torch.ones(len(batch), count, device=image.device)
        gates[torch.arange(len(batch)), batch] = 0
        with gated(model, {step: gates}):
            drops.append(baseline - score(model(image.expand(len(batch), *image.shape[1:]))))
    return torch.cat(drops)
