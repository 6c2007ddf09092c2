"""Weights laid out another way, kept beside the frozen ones they are made of."""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # weight -> {form: (state, the weight in that form)}


def in_form(weight: Tensor, form: Hashable, make: Callable[[], Tensor]) -> Tensor:
    """make(), without gradient; of a frozen weight made once for every form and kept as long as the weight is.

    A weight that learns may change unseen (a replayed training step counts no version), so it is made every time.
    """
    if weight.requires_grad or weight.is_inference():
        return make()
    kept: dict = _kept.get(weight) or {}
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
