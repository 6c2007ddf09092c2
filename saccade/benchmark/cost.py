"""Parameters and multiply-adds, counted on the meta device."""

from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from timm.models import create_model
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

OTHER = "other"


class Cost(NamedTuple):
    """Parameters, and multiply-adds of one forward pass on one image; the same of every part.

    Parts are the submodules of a model, with elements of module lists one by one ("stages.0"). What belongs to none of
    them, such as layers that the model itself calls, is the part "other".
    """

    params: int
    madds: int
    parts: "dict[str, Cost]" = {}  # noqa: RUF012 (never changed)

    def __repr__(self) -> str:
        parts = f", parts of {', '.join(self.parts)}" if self.parts else ""
        return f"Cost(params={self.params}, madds={self.madds}{parts})"


def count(
    model: nn.Module | str, size: int | tuple[int, ...] = 224, inputs: tuple[Any, ...] | None = None, **options: Any
) -> Cost:
    """Return the parameters and multiply-adds of a model, or of a model name, for one image of `size` (H, W).

    Runs on the meta device. Multiply-adds are half the FLOPs of torch's `FlopCounterMode` and cover convolutions,
    linear layers and matrix products, as in the papers. A video model gets its default number of frames. A `size` of
    more than two values is the full shape after the batch axis, such as (3, 32, 224, 224) for a clip. A detector is
    counted with the number of proposals and masks of its `dry_run`.

    `inputs` are the arguments of a module that does not take images (a tokenizer, a pyramid, a head): tensors in
    tuples, lists or dicts, of which only the shapes matter.

    Example:
        >>> cost = saccade.count(saccade.create_model("svit_nano"), size=64)
        >>> cost.params, cost.madds
        (2997144, 38770176)
        >>> list(cost.parts)
        ['stem', 'stages.0', 'stages.1', 'stages.2', 'stages.3', 'projection', 'head']
    """
    with torch.device("meta"):
        module = create_model(model, **options) if isinstance(model, str) else deepcopy(model).to("meta")
        if inputs is None:
            inputs = (torch.empty(1, *_image_shape(module, size)),)
        on_meta: Any = tree_map(lambda value: value.to("meta") if isinstance(value, Tensor) else value, inputs)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            madds = _count_parts(module.eval(), on_meta, counter)
    total, madds_total = _parameters(module), counter.get_total_flops() // 2
    parts = {name: Cost(_parameters(part), madds[name]) for name, part in _parts(module) if madds[name]}
    other = Cost(total - sum(cost.params for cost in parts.values()), madds_total - sum(madds.values()))
    return Cost(total, madds_total, parts | ({OTHER: other} if parts and any(other[:2]) else {}))


def _image_shape(model: nn.Module, size: int | tuple[int, ...]) -> tuple[int, ...]:
    shape = (size, size) if isinstance(size, int) else tuple(size)
    if len(shape) > 2:
        return shape
    frames = (getattr(model, "pretrained_cfg", None) or {}).get("input_size", ())[1:-2]  # () except for video models
    return (getattr(model, "in_chans", 3), *frames, *shape)


def _count_parts(model: nn.Module, inputs: tuple[Any, ...], counter: FlopCounterMode) -> Counter[str]:
    """Run the model once; return the multiply-adds of its parts, counted from call to return of each."""
    madds: Counter[str] = Counter()
    hooks = []
    for name, part in _parts(model):
        starts: list[int] = []
        hooks.append(part.register_forward_pre_hook(lambda *_, into=starts: into.append(counter.get_total_flops())))
        hooks.append(
            part.register_forward_hook(
                lambda *_, name=name, starts=starts: madds.update(
                    {name: (counter.get_total_flops() - starts.pop()) // 2}
                )
            )
        )
    getattr(model, "dry_run", model)(*inputs)
    for hook in hooks:
        hook.remove()
    return madds


def _parts(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules by name; of containers (lists, dicts, a sequence of stages) the elements."""
    for name, child in model.named_children():
        stages = type(child) is nn.Sequential and name in ("stages", "layers")  # as models of timm call them
        if stages or type(child) in (nn.ModuleList, nn.ModuleDict):  # timm derives backbones from ModuleDict
            yield from _parts(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
