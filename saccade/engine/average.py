"""A running average of a model's weights."""

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn


class Average(ModelEmaV3):
    """timm's, with its pairs of tensors looked up once: for small models the search takes longer than the average.

    It must first be updated when the model is where it stays.
    """

    pairs: tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]] | None = None

    def apply_update_(self, model: nn.Module, decay: float) -> None:
        if self.pairs is None:
            mine, theirs = list(self.module.state_dict().values()), list(model.state_dict().values())
            real = [tensor.is_floating_point() for tensor in mine]
            self.pairs = tuple(  # type: ignore[assignment]
                [tensor for tensor, is_real in zip(tensors, real, strict=True) if is_real == wanted]
                for wanted in (True, False)
                for tensors in (mine, theirs)
            )
        mine, theirs, my_counts, their_counts = self.pairs  # type: ignore[misc]
        torch._foreach_lerp_(mine, theirs, weight=1 - decay)
        if my_counts:
            torch._foreach_copy_(my_counts, their_counts)
