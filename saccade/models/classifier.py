"""timm's interface where families agree: classifier, and features of the stages."""

from collections.abc import Collection
from typing import Any

from timm.models._features import feature_take_indices
from torch import Tensor, nn

from saccade.models.registry import choose


class Classifier(nn.Module):
    """A model with a head that has timm's `fc` and `reset`."""

    head: Any

    def __init__(self, in_chans: int, num_classes: int, num_features: int):
        super().__init__()
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.num_features = num_features  # of `forward_features`
        self.head_hidden_size = num_features  # of what the last layer reads

    def get_classifier(self) -> nn.Module:
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = num_classes
        self.head.reset(num_classes, global_pool)

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """Output of `forward_features` -> logits (B, K), or with `pre_logits` what the last layer reads."""
        return self.head(features, pre_logits=pre_logits)


class StagedClassifier(Classifier):
    """A classifier with `stages` at strides 4, 8, 16 and 32, whose outputs are its features."""

    stages: nn.Sequential | nn.ModuleList
    feature_info: list[dict[str, Any]]

    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if name.endswith(".table")}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        for stage in self.stages:
            stage.grad_checkpointing = enable  # type: ignore[assignment] # nn.Module declares Tensor | Module

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
        count = len(self.feature_info)
        take, last = feature_take_indices(count, indices)
        features, intermediates = self.forward_stages(x, last + 1 if stop_early else count, take)
        return intermediates if intermediates_only else (features, intermediates)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages after the last chosen one, and with `prune_head` the classifier."""
        take, last = feature_take_indices(len(self.stages), indices)
        self.stages = self.stages[: last + 1]
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def forward_stages(self, images: Tensor, count: int, take: Collection[int]) -> tuple[Tensor, list[Tensor]]:
        """Images (B, 3, H, W) -> features after `count` stages, and those after the stages in `take`."""
        raise NotImplementedError
