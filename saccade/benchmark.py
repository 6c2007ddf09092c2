"""What a model costs: parameters, multiply-adds, time, memory."""

from typing import NamedTuple

import torch
from timm.models import create_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


class Cost(NamedTuple):
    """Parameters and multiply-adds of one forward pass of one image."""

    params: int
    madds: int


def count(model: nn.Module | str, size: int | tuple[int, ...] = 224, **kwargs) -> Cost:
    """Parameters and multiply-adds of `model` (or of a model by name) on one image of `size` (H, W).

    Runs on the meta device: instant, without memory. Multiply-adds are half of what torch's flop counter says, and
    cover convolutions, linear layers and matrix products, as the papers count. A longer `size` is taken as the
    whole shape behind the batch axis, such as (3, 32, 224, 224) for a video.
    """
    if isinstance(model, str):
        with torch.device("meta"):
            model = create_model(model, **kwargs)
    else:
        from copy import deepcopy

        with torch.device("meta"):
            model = deepcopy(model).to("meta")
    shape = (size, size) if isinstance(size, int) else tuple(size)
    if len(shape) == 2:
        shape = (getattr(model, "in_chans", 3), *shape)
    images = torch.empty(1, *shape, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(images)
    return Cost(sum(p.numel() for p in model.parameters()), counter.get_total_flops() // 2)
