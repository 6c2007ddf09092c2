"""Weights in the dtype or the layout that kernels read.

Casts: under autocast PyTorch casts every weight and bias by itself, at every call: 200 of the 431 launches of an eager
pass of PaCa-S, which is limited by launches. At the start of a pass (see `_model_pass`) all of them are cast
together (launches per eager pass on an H200: PaCa-S 431 -> 239, SViT-S 445 -> 286, SparseFormer-T 276 -> 183, VT-R50
260 -> 202). In eager training only autograd functions that return the gradients of the uncast weights read the casts:
passing 170 tensors through a function of its own costs as much CPU time as casting them one by one. Under
torch.compile, in inference and training, it is one operator in the graph, whose backward casts the gradients together;
Inductor would launch a kernel per weight and one per gradient. Every pass casts again, so no change of the weights is
missed.

Layouts: `cached_layout` caches what kernels derive from weights that `freeze_weights` has marked.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors
from torch.library import custom_op
from torch.utils.weak import WeakTensorKeyDictionary

from saccade.ops import _dispatch as dispatch

P = ParamSpec("P")
R = TypeVar("R")
Model = TypeVar("Model", bound=nn.Module)
_dtype_and_device = attrgetter("dtype", "device")


class _Pass(threading.local):
    """The forward pass of a model under way in this thread: its weights -> their casts."""

    casts: dict[Tensor | None, Tensor] = {}  # noqa: RUF012 (replaced, never changed)


class _Plan:
    """The weights of a model that are cast, and in inference the memory of their casts."""

    def __init__(self, model: nn.Module, kind: str, dtype: torch.dtype, trains: bool):
        self.dtype, self.trains = dtype, trains
        weights = [weight for weight in _cast_weights_of(model, kind, trains) if weight.dtype == torch.float32]
        self.weights = sorted(weights, key=lambda weight: weight.numel() % 8 > 0)  # keeps views of one tensor aligned
        self.sources = list(map(_dtype_and_device, self.weights))
        with torch.inference_mode(False), torch.no_grad():  # passes in and outside of inference mode write into them
            self.copies = [] if trains else [torch.empty_like(weight, dtype=dtype) for weight in self.weights]

    def is_valid(self, dtype: torch.dtype, trains: bool) -> bool:
        """Whether the weights still have their dtypes and devices. A weight that was replaced is merely not found."""
        same = self.dtype == dtype and self.trains == trains
        return same and list(map(_dtype_and_device, self.weights)) == self.sources

    def cast(self) -> dict[Tensor | None, Tensor]:
        """Every weight's cast. In training they are new tensors, which backward may need after the next pass."""
        if not self.weights:
            return {}
        copies: Any = self.copies
        with torch.no_grad():
            if self.trains:
                memory = self.weights[0].new_empty(sum(map(Tensor.numel, self.weights)), dtype=self.dtype)
                copies = _unflatten_dense_tensors(memory, self.weights)
            torch._foreach_copy_(copies, self.weights)
        return dict(zip(self.weights, copies, strict=True))


_pass = _Pass()
_plans: WeakKeyDictionary[nn.Module, _Plan] = WeakKeyDictionary()
_layouts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # frozen weight -> {key: ((version, address), layout)}
_traced_casts: dict[Tensor | None, Tensor] = {}  # as `_Pass.casts`, while torch.compile traces; else empty


def cast_weight(weight: Tensor | None) -> Any:
    """The cast of a weight for the current forward pass; the weight itself without a cast, and in eager training."""
    return cast_weights(weight, None)[0]


def cast_weights(weight: Tensor | None, bias: Tensor | None) -> Any:
    """`cast_weight` of a layer's weight and bias."""
    casts = _current_casts()
    return (casts.get(weight, weight), casts.get(bias, bias)) if len(casts) > 0 else (weight, bias)


def cast_to(dtype: torch.dtype, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Any]:
    """A layer's weight and bias in this dtype, for autograd functions, which differentiate the casts themselves."""
    weight, bias = cast_weights(weight, bias)  # inside such a function gradients are disabled
    return dispatch.cast(weight, dtype), None if bias is None else dispatch.cast(bias, dtype)


def has_casts() -> bool:
    """Whether the weights of a model have been cast for the current forward pass."""
    return len(_current_casts()) > 0  # bool() of a dict breaks graphs of torch 2.11


def _current_casts() -> dict[Tensor | None, Tensor]:
    if dispatch.is_compiling():
        return _traced_casts
    return {} if dispatch.is_training() else _pass.casts


def begin_pass(model: nn.Module) -> bool:
    """Cast the weights of a model for an eager pass; whether there is anything to end."""
    autocast, trains = dispatch.eager_autocast(), dispatch.is_training()
    if autocast is None:
        return False
    kind, dtype = autocast
    first = next(_cast_weights_of(model, kind, trains), None)
    if first is None or first in _pass.casts:  # part of a model that has cast it
        return False
    plan = _plans.get(model)
    if plan is None or not plan.is_valid(dtype, trains):
        plan = _plans[model] = _Plan(model, kind, dtype, trains)
    _pass.casts = plan.cast()
    return True


def end_pass() -> None:
    _pass.casts = {}


def run_traced(method: Callable[Concatenate[Model, P], R], model: Model, *args: P.args, **kwargs: P.kwargs) -> R:
    """The method as torch.compile traces it: one operator casts all weights."""
    autocast = dispatch.traced_autocast()
    if autocast is None or len(_traced_casts) > 0:
        return method(model, *args, **kwargs)
    weights = _traced_weights_of(model, autocast[0])
    for trains in (True, False):  # apart, so that no gradients of frozen weights are computed
        group = [weight for weight in weights if weight.requires_grad == trains]
        if len(group) > 1:
            for weight, cast in zip(group, _cast_together(group, autocast[1]), strict=True):
                _traced_casts[weight] = cast
    try:
        return method(model, *args, **kwargs)
    finally:
        _traced_casts.clear()


def _cast_together_forward(weights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    casts = [torch.empty_like(weight, dtype=dtype) for weight in weights]
    torch._foreach_copy_(casts, weights)
    return casts


def _cast_together_fake(weights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(weight, dtype=dtype) for weight in weights]


def _cast_together_setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)  # weights without gradient stay without


def _cast_together_backward(ctx: Any, g: list[Tensor | None]) -> tuple[list[Tensor | None], None]:
    casts = iter(_cast_together([x for x in g if x is not None], torch.float32))
    return [None if x is None else next(casts) for x in g], None


_cast_together = custom_op("saccade::cast_together", _cast_together_forward, mutates_args=())
_cast_together.register_fake(_cast_together_fake)
_cast_together.register_autograd(_cast_together_backward, setup_context=_cast_together_setup)


def _traced_weights_of(model: nn.Module, kind: str) -> list[Tensor]:
    """The float32 weights of layers that read them through `cast_weights` under torch.compile."""
    weights = []
    trains = dispatch.is_training()  # in inference norms are folded into the float32 weights of convolutions
    for module in model.modules():
        is_conv = trains and isinstance(module, nn.Conv2d) and module.groups == 1 and module.in_channels > 3
        if is_conv or getattr(module, "cast_weights", False):
            for weight in module.parameters(recurse=False):
                if weight.dtype == torch.float32 and weight.device.type == kind:
                    weights.append(weight)
    return weights


def _cast_weights_of(model: nn.Module, kind: str, trains: bool) -> Iterator[Tensor]:
    """Weights and biases that layers, or in training their autograd functions, read through this file, each once."""
    yielded = set()
    for module in model.modules():
        if trains:
            reads = isinstance(module, nn.Linear)
        elif isinstance(module, nn.Conv2d):
            reads = module.groups == 1  # kernels of grouped ones read float32 weights
        else:
            reads = isinstance(module, nn.Linear) or getattr(module, "cast_weights", False)
        for weight in module.parameters(recurse=False) if reads else ():
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
