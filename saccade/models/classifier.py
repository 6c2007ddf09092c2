"""timm's interface where families agree: classifier, and features of the stages."""

from collections.abc import Collection
from typing import Any

from timm.models._features import feature_take_indices
from torch import Tensor, nn

from saccade.models.registry import choose


class Classifier(nn.Module):
    """A model with a head that has timm's `fc` and `reset`."""

    head: Any
    num_classes: int

    def get_classifier(self) -> nn.Module:
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = num_classes
        self.head.reset(num_classes, global_pool)


class StagedClassifier(Classifier):
    """A classifier with `stages` at strides 4, 8, 16 and 32, whose outputs are its features."""

    stages: nn.Sequential | nn.ModuleList

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Images (B, 3, H, W) -> features of the chosen stages; `norm` has no effect."""
        choose("output_fmt", output_fmt, ("NCHW",))
        take, last = feature_take_indices(len(self.stages), indices)
        features, intermediates = self.forward_stages(x, last + 1 if stop_early else len(self.stages), take)
        return intermediates if intermediates_only else (features, intermediates)

    def forward_stages(self, images: Tensor, count: int, take: Collection[int]) -> tuple[Tensor, list[Tensor]]:
        """Images (B, 3, H, W) -> features after `count` stages, and those after the stages in `take`."""
        raise NotImplementedError
