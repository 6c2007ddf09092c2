"""Parameters and multiply-adds, counted on the meta device."""

from copy import deepcopy
from typing import Any, NamedTuple

import torch
from timm.models import create_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


class Cost(NamedTuple):
    """Parameters, and multiply-adds of one forward pass on one image."""

    params: int
    madds: int


def count(model: nn.Module | str, size: int | tuple[int, ...] = 224, **options: Any) -> Cost:
    """Return the parameters and multiply-adds of a model, or of a model name, for one image of `size` (H, W).

    Runs on the meta device. Multiply-adds are half the FLOPs of torch's `FlopCounterMode` and cover convolutions,
    linear layers and matrix products, as in the papers. A video model gets its default number of frames. A `size` of
    more than two values is the full shape after the batch axis, such as (3, 32, 224, 224) for a clip. A detector is
    counted with the number of proposals and masks of its `dry_run`.
    """
    with torch.device("meta"):
        model = create_model(model, **options) if isinstance(model, str) else deepcopy(model).to("meta")
        shape = (size, size) if isinstance(size, int) else tuple(size)
        if len(shape) == 2:
            frames = (getattr(model, "pretrained_cfg", None) or {}).get("input_size", ())[
                1:-2
            ]  # () except for video models
            shape = (getattr(model, "in_chans", 3), *frames, *shape)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            getattr(model.eval(), "dry_run", model)(torch.empty(1, *shape))
    return Cost(sum(parameter.numel() for parameter in model.parameters()), counter.get_total_flops() // 2)
