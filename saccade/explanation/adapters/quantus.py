"""Quantus: the importance of a model's tokens as an explanation to evaluate.

quantus.MaxSensitivity(...)(model=model, x_batch=x, y_batch=y, explain_func=explain_func)
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from saccade.explanation.adapters.steps import record_step
from saccade.explanation.observe import eval_mode
from saccade.explanation.scores.importance import (
    class_logits,
    class_score,
    gradient_importance,
    occlusion_importance,
)
from saccade.explanation.scores.score import saliency

METHODS = ("gradient", "occlusion")


def explain_func(
    model: nn.Module,
    inputs: np.ndarray | Tensor,
    targets: np.ndarray | Tensor | list[int],
    method: str = "gradient",
    step: int = -1,
    device: str | torch.device | None = None,
) -> np.ndarray:
    """Prepared images (B, C, H, W) and classes (B,) -> heat maps (B, 1, H, W) for Quantus's `explain_func`.

    Every token's map, as a distribution over pixels, times its importance for the class: by `method` "gradient" (one
    backward pass per batch) or "occlusion" (one forward pass per token). `step` counts the recorded steps.
    """
    if method not in METHODS:
        raise ValueError(f"expected method of {', '.join(METHODS)}, got {method!r}.")
    if device is not None:
        model = model.to(device)
    images = torch.as_tensor(inputs).to(next(model.parameters()))
    classes = torch.as_tensor(targets, device=images.device).long().reshape(-1)
    if images.ndim != 4 or len(classes) != len(images):
        raise ValueError(
            f"expected images (B, C, H, W) and B classes, got {tuple(images.shape)} and {len(classes)} classes."
        )
    index, steps, counts = record_step(model, images, step)
    with eval_mode(model):
        if method == "gradient":
            weights = gradient_importance(model, images, _scores_of(classes), counts)[index]
        else:
            weights = torch.stack(
                [
                    occlusion_importance(model, image[None], class_score(int(target)), index, counts[index])
                    for image, target in zip(images, classes, strict=True)
                ]
            )
    size = images.shape[2], images.shape[3]
    maps = [saliency(each, weight, size) for each, weight in zip(steps, weights.float(), strict=True)]
    return torch.stack(maps)[:, None].numpy()


def _scores_of(classes: Tensor) -> Any:
    """Score function: every image's logit of its own class."""

    def score(output: Any) -> Tensor:
        logits = class_logits(output)
        if int(classes.max()) >= logits.shape[1]:
            raise ValueError(f"expected classes below {logits.shape[1]}, got {int(classes.max())}.")
        return logits.gather(1, classes[:, None])[:, 0]

    return score
