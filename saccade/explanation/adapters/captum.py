"""Captum: pixels grouped by token as a `feature_mask`, and a model as a function of its tokens.

FeatureAblation(model).attribute(images, target=3, feature_mask=feature_mask(model, images))

tokens = TokenModel(model, images)
values = IntegratedGradients(tokens).attribute(tokens.gates, target=3, additional_forward_args=images)
heat = tokens.to_pixels(values)
"""

from typing import Any

import torch
from torch import Tensor, nn

from saccade.explanation.adapters.steps import record_step
from saccade.explanation.figures.mosaic import strongest_tokens
from saccade.explanation.hooks.gates import gated
from saccade.explanation.scores.score import saliency


def feature_mask(model: nn.Module, images: Tensor, step: int = -1) -> Tensor:
    """Prepared images (B, C, H, W) -> (B, 1, H, W) int64: the strongest token at every pixel.

    Pixels that no token covers, which SparseFormer has, form one more group, numbered M. `step` counts the recorded
    steps.
    """
    _, steps, counts = record_step(model, images, step)
    size = images.shape[2], images.shape[3]
    labels = torch.stack([torch.from_numpy(strongest_tokens(each, size)[0]).long() for each in steps])
    return torch.where(labels < 0, counts[step], labels)[:, None].to(images.device)


class TokenModel(nn.Module):
    """A model as a function of one factor per token of a recorded step: 1 unchanged, 0 removed.

    `gates` (B, M) are ones, the input to attribute; images are the `additional_forward_args`. Zeros are the baseline.
    """

    gates: Tensor

    def __init__(self, model: nn.Module, images: Tensor, step: int = -1):
        super().__init__()
        self.model = model
        self.index, self.steps, counts = record_step(model, images, step)
        self.register_buffer("gates", images.new_ones(images.shape[0], counts[self.index]), persistent=False)

    def forward(self, gates: Tensor, images: Tensor) -> Any:
        """gates (B, M), images (B, C, H, W) -> the model's output."""
        with gated(self.model, {self.index: gates}):
            return self.model(images)

    def to_pixels(self, attributions: Tensor) -> Tensor:
        """Attributions (B, M) -> heat maps (B, 1, H, W): the sum of the tokens' maps, each summing to its value."""
        if attributions.shape != self.gates.shape:
            raise ValueError(f"expected attributions {tuple(self.gates.shape)}, got {tuple(attributions.shape)}.")
        maps = [
            saliency(step, values, step.image_size)
            for step, values in zip(self.steps, attributions.detach().float(), strict=True)
        ]
        return torch.stack(maps)[:, None]
