"""PaCa Sec. 3.3 and Fig. 6: mask the image by each cluster's heat map and classify it again."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.explanation.drawing.figure import Figure, Panel
from saccade.explanation.drawing.overlay import apply_mask, downscale
from saccade.explanation.observe import Observation, Step
from saccade.explanation.scores.importance import class_logits
from saccade.tokens.trace import AssignmentTrace, expect_trace


class Clusters(NamedTuple):
    """Mask of every cluster, and the prediction for the image masked by it."""

    heat: Tensor  # (M, h, w), sigmoid of the assignment before its softmax
    masks: Tensor  # (M, H, W), heat above its mean, at the size of the image
    probability: Tensor  # (M,), of the class, for the masked images
    positive: Tensor  # (M,), whether the masked image is still assigned the class
    unmasked: float  # probability of the class for the original image

    def ranked(self, positive: bool) -> np.ndarray:
        """Indices of the positive or negative clusters, highest probability first."""
        order = self.probability.argsort(descending=True, stable=True)
        return order[self.positive[order] == positive].cpu().numpy()


def heat_maps(trace: AssignmentTrace) -> Tensor:
    """(M, h, w): sigmoid of the scores of a one-image trace."""
    if trace.scores is None:
        raise ValueError(f"expected scores before the softmax in the trace of {trace.name}, got None.")
    return trace.scores[0].float().sigmoid().unflatten(1, trace.size)


def threshold_masks(heat: Tensor, size: tuple[int, int]) -> Tensor:
    """Heat above its mean, enlarged by nearest neighbour (PaCa Eq. 7): (M, h, w) -> bool (M, *size)."""
    mask = (heat > heat.mean((1, 2), keepdim=True)).float()
    return F.interpolate(mask[None], size, mode="nearest")[0].bool()


@torch.no_grad()
def classify_clusters(
    model: nn.Module,
    step: Step,
    image: Tensor,
    prepare: Callable[[Tensor], Tensor],
    class_index: int,
    batch_size: int = 20,
    multi_label: bool = False,
) -> Clusters:
    """Classify the image (3, H, W) masked by each cluster (PaCa Eq. 8).

    `prepare` normalises images (B, 3, H, W); the mask is applied before it, so masked pixels are black. A class is
    predicted if it is the most probable one, by a `multi_label` model if its own probability is at least 0.5.
    """
    heat = heat_maps(expect_trace(step.trace, AssignmentTrace)).to(image.device)
    masks = threshold_masks(heat, (image.shape[1], image.shape[2]))
    probabilities, positive = [], []
    for batch in masks.split(batch_size):
        logits = class_logits(model(prepare(image * batch[:, None]))).float()
        probabilities.append((logits.sigmoid() if multi_label else logits.softmax(1))[:, class_index])
        positive.append(probabilities[-1] >= 0.5 if multi_label else logits.argmax(1) == class_index)
    logits = class_logits(model(prepare(image[None]))).float()
    unmasked = (logits.sigmoid() if multi_label else logits.softmax(1))[0, class_index]
    return Clusters(heat, masks, torch.cat(probabilities), torch.cat(positive), float(unmasked))


def cluster_figure(
    observation: Observation,
    step: Step,
    clusters: Clusters,
    class_name: str,
    model_name: str,
    top: int | None = 3,
) -> Figure:
    """The image and the `top` clusters of the positive and the negative group; top=None draws all (PaCa Fig. 6)."""
    image = downscale(observation.view.canvas)
    size = image.shape[:2]
    panels = [Panel(image, observation.view.name, f"unmasked: {clusters.unmasked:.3g}")]
    groups = {"positive": clusters.ranked(True), "negative": clusters.ranked(False)}
    for group, ranked in groups.items():
        masks = threshold_masks(clusters.heat[ranked[:top].copy()], size).cpu().numpy() if len(ranked) else []
        for token, mask in zip(ranked, masks, strict=False):
            note = f"{group}: {clusters.probability[token]:.3g}"
            colour = step.colour(token)
            panels.append(Panel(apply_mask(image, mask), f"token {token}", note, colour))
    counts = ", ".join(f"{len(ranked)} {group}" for group, ranked in groups.items())
    shown = "All clusters are shown." if top is None else f"The first {top} of both groups by probability are shown."
    return Figure(
        "clusters",
        f"Probability of {class_name} from the pixels of one token",
        f"{model_name}, {step.title}, {step.count} tokens: {counts}. Each panel keeps the pixels above the mean of the "
        f"token's heat map; the number is the probability of {class_name} for this masked image. Positive: "
        f"{class_name} is still the top prediction. {shown}",
        panels,
        columns=7 if top == 3 else 8,
    )
