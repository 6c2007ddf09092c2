"""A model's weights in half precision, cast together before a pass that asks for them.

Under autocast the library casts every weight and every bias by itself, at every call: 200 of the 430 launches of an
eager pass of PaCa-S, in which a GPU waits for its host. All at once they are a few. They are cast anew for every pass,
so it does not matter how weights have changed since the last one.

A model that wants that is a `CastsTogether`; its layers ask for `halved(weight)`. Only eager inference on a GPU under
autocast does it, outside recordings: those must not hold memory that is given back when the model is.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from saccade.kernels import HALVES

KIND = "cuda"  # of devices on which it helps
_kind = attrgetter("dtype", "device")


class _Here(threading.local):
    casts: dict[Tensor | None, Tensor] = {}  # noqa: RUF012 (replaced, never changed)


_here = _Here()


def halved(weight: Tensor | None) -> Any:
    """This weight as it was cast for the pass under way; as it is, where none was, or where somebody learns in it."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return weight
    return _here.casts.get(weight, weight)


def both_halved(weight: Tensor, bias: Tensor | None) -> Any:
    """The same of a layer's weight and bias."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return weight, bias
    casts = _here.casts
    return (casts.get(weight, weight), casts.get(bias, bias)) if casts else (weight, bias)


class CastsTogether(nn.Module):
    """A model whose calls cast the weights of all its linear layers and convolutions together."""

    def __call__(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        if torch.is_grad_enabled():
            _plans.pop(self, None)  # who learns needs its memory
        if not casts_help(self):
            return super().__call__(*args, **kwargs)
        with cast_together(self):
            return super().__call__(*args, **kwargs)


def casts_help(model: nn.Module) -> bool:
    """Whether this is eager inference on a GPU under autocast to half precision, of a model that is not compiled."""
    if torch.is_grad_enabled() or not torch.is_autocast_enabled(KIND) or _here.casts:
        return False
    if getattr(model, "_compiled_call_impl", None) is not None or torch.jit.is_tracing():
        return False
    return torch.get_autocast_dtype(KIND) in HALVES and not torch.cuda.is_current_stream_capturing()


@contextmanager
def cast_together(model: nn.Module) -> Iterator[None]:
    """Inside, `halved` knows the model's weights."""
    plan = planned(model, torch.get_autocast_dtype(KIND))
    if plan.weights:
        torch._foreach_copy_(plan.halves, plan.weights)
    _here.casts = plan.casts
    try:
        yield
    finally:
        del _here.casts


class Plan:
    """The weights that are cast, where to, and of which types and on which devices they were."""

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self.dtype = dtype
        self.weights: list[Tensor] = [weight for weight in weights_of(model) if weight.dtype == torch.float32]
        self.kinds = list(map(_kind, self.weights))
        with torch.inference_mode(False), torch.no_grad():  # so that passes of any kind may write into them
            self.halves = [torch.empty_like(weight, dtype=dtype) for weight in self.weights]
        self.casts = dict(zip(self.weights, self.halves, strict=True))

    def holds(self, dtype: torch.dtype) -> bool:
        """Whether the weights are where they were; one that was replaced is merely not found."""
        return self.dtype == dtype and list(map(_kind, self.weights)) == self.kinds


def weights_of(model: nn.Module) -> Iterator[Tensor]:
    """Weights and biases that `halved` is asked for, each once: plain parameters on GPUs."""
    seen = set()
    for module in model.modules():
        grouped = isinstance(module, nn.Conv2d) and module.groups > 1  # whose kernels read the weights as they are
        if grouped or not (isinstance(module, nn.Linear | nn.Conv2d) or getattr(module, "casts_together", False)):
            continue
        for weight in module.parameters(recurse=False):
            if weight not in seen and type(weight) is nn.Parameter and weight.device.type == KIND:
                seen.add(weight)
                yield weight


_plans: WeakKeyDictionary[nn.Module, Plan] = WeakKeyDictionary()


def planned(model: nn.Module, dtype: torch.dtype) -> Plan:
    """The model's plan: the last one, or a new one."""
    plan = _plans.get(model)
    if plan is None or not plan.holds(dtype):
        plan = _plans[model] = Plan(model, dtype)
    return plan
