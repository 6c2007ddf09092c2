"""What happens once per pass of a model: its weights are cast together, and its first pass compiles in parallel.

Triton compiles a kernel when it is first launched, one after the other: half a minute for a training step of SViT-S.
When an eager pass reaches the first kernel that is not compiled, the same pass is therefore run with fake tensors,
which have shapes and dtypes only; what it and its backward would launch is compiled in parallel threads. Models whose
pass cannot be run this way compile one kernel after the other.
"""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from saccade.ops import _dispatch as dispatch
from saccade.ops import _launch, _weights

P = ParamSpec("P")
R = TypeVar("R")
Model = TypeVar("Model", bound=nn.Module)
Call = tuple[Callable[..., Any], nn.Module, tuple, dict[str, Any], bool]
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _State(threading.local):
    call: Call | None = None  # the pass under way in this thread


_state = _State()
_prepared: WeakKeyDictionary[nn.Module, set[Any]] = WeakKeyDictionary()  # model -> modes whose kernels are compiled


def model_pass(method: Callable[Concatenate[Model, P], R]) -> Callable[Concatenate[Model, P], R]:
    """Decorator of the method of a model that runs its layers: see the head of this file, and `_weights`."""

    @wraps(method)
    def run(model: Model, *args: P.args, **kwargs: P.kwargs) -> R:
        if dispatch.is_compiling():
            return _weights.run_traced(method, model, *args, **kwargs)
        before, _state.call = _state.call, (method, model, args, kwargs, dispatch.is_training())
        has_casts = _weights.begin_pass(model)
        try:
            return method(model, *args, **kwargs)
        finally:
            _state.call = before
            if has_casts:
                _weights.end_pass()

    return run


def prepare_kernels() -> None:
    """Compile in parallel what the pass under way will launch; called before its first compilation."""
    call, _state.call = _state.call, None  # once per pass
    if call is None:
        return
    method, model, args, kwargs, grad = call  # in the forward of an autograd function, gradients are disabled
    mode = grad, model.training, dispatch.autocast_state()
    if mode in _prepared.setdefault(model, set()):
        return
    _prepared[model].add(mode)
    try:
        with torch.set_grad_enabled(grad):
            variants = launched_by(method, model, args, kwargs)
        with ThreadPoolExecutor() as threads:
            _launch.compile_in(threads, variants)
    except Exception:  # this is about speed only: what fails here fails again, with its own error, in the pass itself
        return


def launched_by(
    method: Callable[..., Any], model: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> set[_launch.Specialization]:
    """What Triton would compile for a pass of the model and, if gradients are needed, its backward."""
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
    from torch.utils._pytree import tree_leaves, tree_map_only

    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        with FakeCopyMode(fake):
            model = copy.deepcopy(model)
        for module in model.modules():
            for hooks in HOOKS:
                getattr(module, hooks).clear()
        args, kwargs = tree_map_only(
            Tensor, lambda x: fake.from_tensor(x.detach()).requires_grad_(x.requires_grad), (args, kwargs)
        )
        with _launch.record_specializations(execute=False) as variants:
            outputs = [x for x in tree_leaves(method(model, *args, **kwargs)) if isinstance(x, Tensor)]
            outputs = [x for x in outputs if x.requires_grad]
            if outputs:
                weights = [weight for weight in model.parameters() if weight.requires_grad]
                with torch.autograd.set_multithreading_enabled(False):  # launches are logged per thread
                    gradients = [torch.empty_like(x) for x in outputs]
                    torch.autograd.grad(outputs, weights, gradients, allow_unused=True)
    return variants


_launch.before_first_compilation = prepare_kernels
