"""timm's interface where families agree: classifier, and features of the stages."""

from collections.abc import Callable, Collection
from typing import Any

from timm.models._features import feature_take_indices
from torch import Tensor, nn

from saccade import ops
from saccade.layers.grid import channels_last, check_images
from saccade.models.registry import choose


class Classifier(nn.Module):
    """A model with a head that has timm's `fc` and `reset`."""

    head: Any
    forward_features: Callable[[Tensor], Tensor]  # images (B, 3, H, W) -> what `forward_head` reads
    intermediates: Callable[..., tuple[Tensor, list[Tensor]]]  # `forward_intermediates` with checked arguments
    feature_info: list[dict[str, Any]]
    output_formats = ("NCHW",)  # of intermediates; the first is the default

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

    def forward(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) -> logits (B, K)."""
        return self.forward_head(self.forward_features(images))

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """Output of `forward_features` -> logits (B, K), or with `pre_logits` what the last layer reads."""
        return self.head(features, pre_logits=pre_logits)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str | None = None,
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Images (B, 3, H, W) -> output of `forward_features`, chosen intermediates; `norm` has no effect."""
        output_fmt = output_fmt or self.output_formats[0]
        choose("output_fmt", output_fmt, self.output_formats)
        features, intermediates = self.intermediates(x, indices, stop_early, output_fmt)
        return intermediates if intermediates_only else (features, intermediates)

    def prepared(self, images: Tensor) -> Tensor:
        """Images in channels-last memory, after a check of their shape."""
        check_images(images, self.in_chans)
        return channels_last(images)


class StagedClassifier(Classifier):
    """A classifier with `stem`, `position` and `stages` at strides 4, 8, 16 and 32, whose outputs are its features."""

    stem: nn.Module
    position: nn.Module
    stages: nn.Sequential | nn.ModuleList

    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if name.endswith(".table")}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        for stage in self.stages:
            stage.grad_checkpointing = enable  # type: ignore[assignment] # nn.Module declares Tensor | Module

    def intermediates(
        self, images: Tensor, indices: int | list[int] | None, stop_early: bool, output_fmt: str
    ) -> tuple[Tensor, list[Tensor]]:
        count = len(self.feature_info)
        take, last = feature_take_indices(count, indices)
        return self.forward_stages(images, last + 1 if stop_early else count, take)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages after the last chosen one, and with `prune_head` the classifier."""
        take, last = feature_take_indices(len(self.feature_info), indices)
        self.drop_stages(last + 1)
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def drop_stages(self, count: int) -> None:
        """Drop all but the first stages."""
        self.stages = self.stages[:count]

    def forward_stem(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) -> features (B, C, H/4, W/4)."""
        return self.position(self.stem(self.prepared(images)))

    @ops.model_pass
    def forward_stages(self, images: Tensor, count: int, take: Collection[int]) -> tuple[Tensor, list[Tensor]]:
        """Images (B, 3, H, W) -> features after `count` stages, and those after the stages in `take`."""
        features, intermediates = self.forward_stem(images), []
        for i, stage in zip(range(count), self.stages, strict=False):
            features = stage(features)
            if i in take:
                intermediates.append(features)
        return features, intermediates

    def forward_features(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) -> features (B, C, H/32, W/32)."""
        return self.forward_stages(images, len(self.stages), ())[0]
