"""Which tokens matter for an answer: take one away and watch the score, or ask the gradient. Both from outside."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from saccade.explain.hooks.gates import gated

Score = Callable[[Any], Tensor]  # model output -> (B,), what to watch


def class_score(label: int) -> Score:
    """The logit of one class; of a map of logits (B, K, H, W), its mean over the map."""

    def score(output: Any) -> Tensor:
        logits = class_logits(output)
        if not -logits.shape[1] <= label < logits.shape[1]:
            raise ValueError(f"class {label} does not exist: this model has {logits.shape[1]}.")
        return logits[:, label]

    return score


def class_logits(output: Any) -> Tensor:
    """Logits (B, K) of a classifier, or of a segmenter's map averaged over pixels; else a ValueError."""
    if isinstance(output, Tensor) and output.ndim == 4:
        output = output.mean((2, 3))
    if not isinstance(output, Tensor) or output.ndim != 2 or output.shape[1] == 0:
        raise ValueError("this model gives no class scores; pass score=, a function from its output to (B,).")
    return output


def by_gradient(model: nn.Module, images: Tensor, score: Score, counts: Sequence[int]) -> list[Tensor]:
    """For every recorded step the derivative of the score by a factor on each token, (B, M): one backward pass.

    `counts` are the numbers of tokens of the steps, in recorded order. Positive: the token speaks for the answer.
    """
    gates = {
        step: torch.ones(len(images), count, device=images.device, requires_grad=True)
        for step, count in enumerate(counts)
    }
    with torch.enable_grad(), gated(model, gates):
        total = score(model(images)).sum()
    found = torch.autograd.grad(total, list(gates.values()), allow_unused=True)
    return [torch.zeros_like(g) if d is None else d for g, d in zip(gates.values(), found, strict=True)]


@torch.no_grad()
def by_occlusion(
    model: nn.Module,
    image: Tensor,
    score: Score,
    step: int,
    count: int,
    batch: int = 16,
    tokens: Sequence[int] | None = None,
) -> Tensor:
    """How much the score of one image (1, C, H, W), or clip, falls when a token of a recorded step is zeroed: (M,).

    `tokens` asks for some of them only, in their order.
    """
    whole = score(model(image))
    drops = []
    asked = torch.arange(count, device=image.device) if tokens is None else torch.tensor(tokens, device=image.device)
    for rows in asked.split(batch):
        gates = torch.ones(len(rows), count, device=image.device)
        gates[torch.arange(len(rows)), rows] = 0
        with gated(model, {step: gates}):
            drops.append(whole - score(model(image.expand(len(rows), *image.shape[1:]))))
    return torch.cat(drops)
