"""PaCa, section 3.3 and Figure 6: keep only what one cluster marks, and ask the model again (PACA-40 … PACA-46)."""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.explain.drawing.colours import token_colours
from saccade.explain.drawing.figure import Figure, Panel
from saccade.explain.drawing.overlay import masked
from saccade.explain.figures.gallery import small
from saccade.explain.observe import Observation, Step
from saccade.explain.scores.importance import class_logits
from saccade.tokens.trace import AssignmentTrace


class Clusters(NamedTuple):
    """Every cluster's mask, and what the model says when it sees nothing else."""

    heat: Tensor  # (M, h, w), sigmoid of the assignment before its softmax
    masks: Tensor  # (M, H, W), heat above its mean, at the size of the image
    probability: Tensor  # (M,), of the class
    positive: Tensor  # (M,), the masked image still gets the class
    whole: float  # probability of the class for the whole image

    def ranked(self, positive: bool) -> np.ndarray:
        """Numbers of the clusters of one group, highest probability first."""
        order = self.probability.argsort(descending=True, stable=True)
        return order[self.positive[order] == positive].cpu().numpy()


def heat_maps(trace: AssignmentTrace) -> Tensor:
    """(M, h, w): sigmoid of the scores of a one-image trace."""
    if trace.scores is None:
        raise ValueError(f"{trace.name} reports no scores before the softmax, which PaCa's heat maps are made of.")
    return trace.scores[0].float().sigmoid().unflatten(1, trace.size)


def masks_of(heat: Tensor, size: tuple[int, int]) -> Tensor:
    """Heat above its mean, enlarged by nearest neighbour (Eq. 7): (M, h, w) -> bool (M, *size)."""
    mask = (heat > heat.mean((1, 2), keepdim=True)).float()
    return F.interpolate(mask[None], size, mode="nearest")[0].bool()


@torch.no_grad()
def classify_clusters(model: nn.Module, step: Step, image: Tensor, prepare, label: int, batch: int = 20) -> Clusters:
    """Mask the picture (3, H, W) by each cluster in turn and classify it again (Eq. 8).

    `prepare` turns pictures (B, 3, H, W) into the model's input; the mask blackens the picture before it.
    """
    heat = heat_maps(step.trace).to(image.device)
    masks = masks_of(heat, (image.shape[1], image.shape[2]))
    chances, right = [], []
    for some in masks.split(batch):
        logits = class_logits(model(prepare(image * some[:, None])))
        chances.append(logits.float().softmax(1)[:, label])
        right.append(logits.argmax(1) == label)
    whole = class_logits(model(prepare(image[None]))).float().softmax(1)[0, label]
    return Clusters(heat, masks, torch.cat(chances), torch.cat(right), float(whole))


def cluster_figure(
    seen: Observation, step: Step, clusters: Clusters, answer: str, model_name: str, top: int | None = 3
) -> Figure:
    """The picture and the `top` clusters of both groups; top=None draws them all."""
    picture = small(seen.view.picture)
    size = picture.shape[:2]
    panels = [Panel(picture, seen.view.name, f"whole picture: {clusters.whole:.3g}")]
    groups = {"positive": clusters.ranked(True), "negative": clusters.ranked(False)}
    for group, ranked in groups.items():
        masks = masks_of(clusters.heat[ranked[:top].copy()], size).cpu().numpy() if len(ranked) else []
        for token, mask in zip(ranked, masks, strict=False):
            colour = tuple(int(c) for c in token_colours(step.numbers[[token]])[0])
            chance = f"{group}: {clusters.probability[token]:.3g}"
            panels.append(Panel(masked(picture, mask), f"token {token}", chance, colour))
    counts = ", ".join(f"{len(ranked)} {group}" for group, ranked in groups.items())
    shown = "all of them" if top is None else f"the first {top} of both groups by that probability"
    return Figure(
        "clusters",
        f"What is left of {answer} when only one token's pixels stay",
        f"{model_name}, {step.title}, {step.count} tokens: {counts}. Each panel keeps the pixels above the mean of the "
        f"token's heat map; the number is the probability of {answer} when the model sees only them. Positive: it is "
        f"still the first answer. Shown are {shown}.",
        panels,
        columns=7 if top == 3 else 8,
    )
