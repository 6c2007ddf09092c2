"""Weights laid out another way, kept beside the constant ones they are made of."""

from collections.abc import Callable, Hashable, Iterable

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # constant -> {form: (state, the weight in that form)}


def never_change(weights: Iterable[Tensor]) -> None:
    """Let other forms of these weights be kept as long as they are: those of a copy that only answers."""
    for weight in weights:
        _kept.setdefault(weight, {})


def in_form(weight: Tensor, form: Hashable, make: Callable[[], Tensor]) -> Tensor:
    """make(), without gradient; of a weight said to `never_change` made once for every form.

    Only of those: a replayed training step and an average taken over many tensors at once change weights without
    counting a version. A counted change (weights loaded, cast or moved) is seen.
    """
    kept: dict | None = _kept.get(weight)
    if kept is None or weight.requires_grad or weight.is_inference():
        return make()
    state = (weight._version, weight.data_ptr())
    before = kept.get(form)
    if before is not None and before[0] == state:
        return before[1]
    with torch.inference_mode(False), torch.no_grad():
        made = make()
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():  # nothing is computed yet
            return made
        if before is not None and before[1].device == made.device:  # a recording may read it where it lies
            made = before[1].copy_(made)
        _kept[weight] = kept | {form: (state, made)}
    return made
