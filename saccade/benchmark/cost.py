"""Parameters and multiply-adds, counted without running anything."""

from copy import deepcopy
from typing import Any, NamedTuple

import torch
from timm.models import create_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


class Cost(NamedTuple):
    """Parameters, and multiply-adds of one forward pass of one image."""

    params: int
    madds: int


def count(model: nn.Module | str, size: int | tuple[int, ...] = 224, **options: Any) -> Cost:
    """Parameters and multiply-adds of `model` (or of a model by name) on one image of `size` (H, W).

    Runs on the meta device: instant, without memory. Multiply-adds are half of what torch's flop counter says, and
    cover convolutions, linear layers and matrix products, as the papers count. A video model is shown the number of
    frames it was made for. A longer `size` is taken as the whole shape behind the batch axis, such as
    (3, 32, 224, 224) for a clip. A detector counts with as many proposals and masks as its `dry_run` says.
    """
    with torch.device("meta"):
        model = create_model(model, **options) if isinstance(model, str) else deepcopy(model).to("meta")
        shape = (size, size) if isinstance(size, int) else tuple(size)
        if len(shape) == 2:
            frames = (getattr(model, "pretrained_cfg", None) or {}).get("input_size", ())[1:-2]  # () but for video
            shape = (getattr(model, "in_chans", 3), *frames, *shape)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            getattr(model.eval(), "dry_run", model)(torch.empty(1, *shape))
    return Cost(sum(parameter.numel() for parameter in model.parameters()), counter.get_total_flops() // 2)
