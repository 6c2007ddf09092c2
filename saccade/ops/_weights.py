"""Weights in the dtype or the layout that inference reads.

Casts: under autocast PyTorch casts every weight and bias by itself, at every call: 200 of the 431 launches of an eager
pass of PaCa-S, which is limited by launches. `install_weight_cast` lets a model cast all of them by one
`_foreach_copy_` before an eager pass (launches per pass on an H200: PaCa-S 431 -> 239, SViT-S 445 -> 286,
SparseFormer-T 276 -> 183, VT-R50 260 -> 202). Every pass casts again, so no change of the weights is missed.

Layouts: `cached_layout` caches what kernels derive from weights that `freeze_weights` has marked.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from saccade.ops import _dispatch as dispatch

_dtype_and_device = attrgetter("dtype", "device")


class _Pass(threading.local):
    """The forward pass of a model under way in this thread: the model, and its weights -> their casts."""

    model: nn.Module | None = None
    casts: dict[Tensor | None, Tensor] = {}  # noqa: RUF012 (replaced, never changed)


class _Plan:
    """The weights of a model that are cast, and the memory of their casts."""

    def __init__(self, model: nn.Module, kind: str, dtype: torch.dtype):
        self.dtype = dtype
        self.weights = [weight for weight in _cast_weights_of(model, kind) if weight.dtype == torch.float32]
        self.sources = list(map(_dtype_and_device, self.weights))
        with torch.inference_mode(False), torch.no_grad():  # passes in and outside of inference mode write into them
            self.copies = [torch.empty_like(weight, dtype=dtype) for weight in self.weights]
        self.casts: dict[Tensor | None, Tensor] = dict(zip(self.weights, self.copies, strict=True))

    def is_valid(self, dtype: torch.dtype) -> bool:
        """Whether the weights still have their dtypes and devices. A weight that was replaced is merely not found."""
        return self.dtype == dtype and list(map(_dtype_and_device, self.weights)) == self.sources


_pass = _Pass()
_plans: WeakKeyDictionary[nn.Module, _Plan] = WeakKeyDictionary()
_layouts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # frozen weight -> {key: ((version, address), layout)}


def cast_weight(weight: Tensor | None) -> Any:
    """The cast of a weight for the current forward pass; the weight itself without a cast, and in training."""
    if dispatch.is_compiling() or dispatch.is_training():
        return weight
    return _pass.casts.get(weight, weight)


def cast_weights(weight: Tensor, bias: Tensor | None) -> Any:
    """`cast_weight` of a layer's weight and bias."""
    if dispatch.is_compiling() or dispatch.is_training():
        return weight, bias
    casts = _pass.casts
    return (casts.get(weight, weight), casts.get(bias, bias)) if casts else (weight, bias)


def has_casts() -> bool:
    """Whether the weights of a model have been cast for the current forward pass."""
    return not dispatch.is_compiling() and not dispatch.is_training() and bool(_pass.casts)


class _CastWeights:
    """Forward pre-hook of a model: casts its weights before an eager autocast inference pass on a GPU."""

    handle: RemovableHandle  # pickled with the hook, so that hooks registered after loading get other ids

    def __call__(self, model: nn.Module, inputs: Any) -> None:
        if dispatch.is_compiling():
            return
        if dispatch.is_training():
            _plans.pop(model, None)  # free its memory
            return
        autocast = dispatch.eager_autocast()
        if autocast is None or getattr(model, "_compiled_call_impl", None) is not None:
            return
        first = next(_cast_weights_of(model, autocast[0]), None)
        if first is None or (_pass.model is not model and first in _pass.casts):  # part of a model that has cast it
            return
        plan = _plans.get(model)
        if plan is None or not plan.is_valid(autocast[1]):
            plan = _plans[model] = _Plan(model, *autocast)
        if plan.weights:
            torch._foreach_copy_(plan.copies, plan.weights)
        _pass.model, _pass.casts = model, plan.casts


class _DropCasts:
    """Forward hook of a model, called after errors too: ends what `_CastWeights` began."""

    handle: RemovableHandle

    def __call__(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if not dispatch.is_compiling() and _pass.model is model:
            _pass.model, _pass.casts = None, {}


def install_weight_cast(model: nn.Module) -> None:
    """Let `model` cast all its weights in one call before each eager inference pass under autocast on a GPU."""
    before, after = _CastWeights(), _DropCasts()
    before.handle = model.register_forward_pre_hook(before)
    after.handle = model.register_forward_hook(after, always_call=True)


def _cast_weights_of(model: nn.Module, kind: str) -> Iterator[Tensor]:
    """Weights and biases that layers read through `cast_weight`, each once: plain parameters on this kind of device."""
    yielded = set()
    for module in model.modules():
        grouped = isinstance(module, nn.Conv2d) and module.groups > 1  # their kernels read float32 weights
        if grouped or not (isinstance(module, nn.Linear | nn.Conv2d) or getattr(module, "cast_weights", False)):
            continue
        for weight in module.parameters(recurse=False):
            if weight not in yielded and type(weight) is nn.Parameter and weight.device.type == kind:
                yielded.add(weight)
                yield weight


def freeze_weights(weights: Iterable[Tensor]) -> None:
    """Allow `cached_layout` of these weights, which are those of an inference-only copy."""
    for weight in weights:
        _layouts.setdefault(weight, {})


def cached_layout(weight: Tensor, key: Hashable, build: Callable[[], Tensor]) -> Tensor:
    """build(), computed once per key for a frozen weight.

    Only for frozen weights: a CUDA graph of a training step, or an average over lists of tensors, changes weights
    without counting a version. Counted changes (weights loaded, cast or moved) are noticed.
    """
    if dispatch.is_compiling():
        return build()
    cached: dict | None = _layouts.get(weight)
    if cached is None or weight.requires_grad or weight.is_inference():
        return build()
    version = (weight._version, weight.data_ptr())
    entry = cached.get(key)
    if entry is not None and entry[0] == version:
        return entry[1]
    with torch.inference_mode(False), torch.no_grad():
        layout = build()
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():  # nothing is computed yet
            return layout
        if entry is not None and entry[1].device == layout.device:  # a CUDA graph may read it at its address
            layout = entry[1].copy_(layout)
        _layouts[weight] = cached | {key: (version, layout)}
    return layout
