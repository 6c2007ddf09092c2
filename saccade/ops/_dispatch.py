"""Choose the implementation of an operation.

This is the only code that tests device, dtype, memory layout, hooks, autocast, torch.compile or export. Every
operation has a reference in plain PyTorch, which specifies it and runs wherever no fused implementation applies:

    def group_reference(features, cell): ...                                  # the specification

    @register_op("super_token_group", reference=group_reference, supports=...)
    def group(features, cell): ...                                            # the Triton version

    group(features, 8)                              # runs one of the two
    group.implementation(features, 8)               # "triton" or "reference": which one it would be

`saccade.ops.enabled(False)` as a context keeps every model on references, `disabled("super_token_group")` one
operation. Programs to be exported, which run on other machines, consist of references.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import update_wrapper
from inspect import signature
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.library import custom_op, triton_op
from torch.utils._python_dispatch import _get_current_dispatch_mode

from saccade.ops._launch import HAS_TRITON, is_interpreting, record_specializations, traced

HALF_DTYPES = (torch.bfloat16, torch.float16)
KERNEL_DTYPES = (torch.float32, *HALF_DTYPES)
HAS_CUDNN = torch.version.hip is None and torch.backends.cudnn.is_available()  # at import: Dynamo cannot trace the call
P = ParamSpec("P")
R = TypeVar("R")
Layer = TypeVar("Layer", bound=type[nn.Module])
# What Inductor (up to torch 2.12) does when it first meets an operator takes minutes after a ResNet: see `_announce`.
_INDUCTOR_WALKS_GRAPH = tuple(int(part) for part in torch.__version__.split(".")[:2]) <= (2, 12)
REGISTRY: dict[str, "Op"] = {}
_plain_layers: set[type] = {nn.Linear, nn.Conv2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.Identity, nn.MaxPool2d, nn.ReLU}
_switch: dict[str, Any] = {"on": True, "disabled": frozenset(), "devices": ("cuda",), "record": None, "fixed": False}


def enabled(on: bool) -> AbstractContextManager[None]:
    """Allow fused implementations, or run every operation by its reference, inside the context."""
    return _set("on", on)


def disabled(*names: str) -> AbstractContextManager[None]:
    """Run these operations (keys of `REGISTRY`) by their references inside the context."""
    unknown = set(names) - set(REGISTRY)
    if unknown:
        raise ValueError(f"no operation named {', '.join(sorted(unknown))}. Choose from {', '.join(sorted(REGISTRY))}.")
    return _set("disabled", _switch["disabled"] | set(names))


def interpreted() -> AbstractContextManager[None]:
    """Let Triton's interpreter (TRITON_INTERPRET=1) run the kernels on CPU tensors inside the context, for tests."""
    return _set("devices", (*_switch["devices"], "cpu"))


def fixed_shapes() -> AbstractContextManager[None]:
    """Allow eager calls inside the context what must be prepared per shape: calls to be captured and replayed."""
    return _set("fixed", True)


def record_implementations() -> AbstractContextManager[set[tuple[str, str]]]:
    """Collect (operation, implementation) of every call inside the context."""
    return _set("record", set())


@contextmanager
def _set(key: str, value: Any) -> Iterator[Any]:
    before = _switch[key]
    _switch[key] = value
    try:
        yield value
    finally:
        _switch[key] = before


class Op(Generic[P, R]):
    """An operation: a reference, and fused implementations in the order in which they are tried."""

    def __init__(self, name: str, reference: Callable[P, R]):
        self.name = name
        self.reference = reference
        self.fused: list[tuple[str, Callable[..., bool], Callable[P, R]]] = []
        update_wrapper(self, reference)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.choose(*args, **kwargs)[1](*args, **kwargs)

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> tuple[str, Callable[P, R]]:
        """Name and function of the implementation that runs for these arguments."""
        chosen = "reference", self.reference
        if _switch["on"] and self.name not in _switch["disabled"] and not is_exporting():
            for name, supports, run in self.fused:
                if supports(*args, **kwargs):
                    chosen = name, run
                    break
        if _switch["record"] is not None:
            _switch["record"].add((self.name, chosen[0]))
        return chosen

    def implementation(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """Name of the implementation that would run for these arguments."""
        return self.choose(*args, **kwargs)[0]

    def add(self, name: str, supports: Callable[..., bool]) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorator that adds a further implementation, tried after those before it."""

        def register(run: Callable[P, R]) -> Callable[P, R]:
            self.fused.append((name, supports, run))
            return run

        return register


def register_op(
    name: str, reference: Callable[P, R], supports: Callable[..., bool], implementation: str = "triton"
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Decorator that makes an operation of a fused function and its reference.

    supports: called with the operation's arguments; whether the fused function supports them. It is built from the
        predicates below, and is called only where the operation is enabled.
    """

    def register(run: Callable[P, R]) -> Op[P, R]:
        op = Op(name, reference)
        op.add(implementation, supports)(run)
        if name in REGISTRY:
            raise ValueError(f"operation {name} is registered twice.")
        REGISTRY[name] = op
        return op

    return register


class FusedOp:
    """A fused function in the three forms in which PyTorch runs it.

        eager, no gradient    forward(*inputs)
        eager training        an autograd.Function around forward and backward
        torch.compile         a torch.library operator over the same bodies, whose Triton kernels Inductor launches

    Args:
        name: of the torch.library operators `saccade::name` and `saccade::name_backward`.
        forward: annotated function of tensors and numbers; returns a tensor or a tuple of tensors, none of which
            aliases an input.
        gradients: annotated function of tensors and numbers that computes the gradients, by kernels.
        setup: setup(ctx, inputs, output) saves what backward needs; by default the inputs, all tensors before the
            others, which are `ctx.options`.
        backward: backward(ctx, gradients, *output_gradients) returns one gradient per input (None where there is
            none), calling `gradients`, which is the function above or its operator; by default with the gradient of
            the output and the saved inputs, for the gradients of all tensors.

    Rules for what torch.compile traces: no tensor twice in one launch that writes to it; floats are constants of the
    kernel, since Inductor (torch 2.11) passes them as float64; helper kernels are called by the name of their
    definition, since Inductor copies their source.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        gradients: Callable[..., Any] | None = None,
        setup: Callable[..., None] | None = None,
        backward: Callable[..., Any] | None = None,
    ):
        self.forward = forward
        self.function: Any = None
        self.operator = _library_op(name, forward)
        if gradients is None:
            return
        setup, backward = setup or _saving_inputs(forward), backward or _gradients_of_tensors
        gradients_op = _library_op(f"{name}_backward", gradients)
        self.function = _autograd_function(name, forward, gradients, setup, backward)
        self.operator.register_autograd(lambda ctx, *g: backward(ctx, gradients_op, *g), setup_context=setup)

    def __call__(self, *inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.operator(*inputs)
        if self.function is not None and needs_grad(*inputs):
            return self.function.apply(*inputs)
        return self.forward(*inputs)


def _saving_inputs(forward: Callable[..., Any]) -> Callable[..., None]:
    count = sum(parameter.annotation is Tensor for parameter in signature(forward).parameters.values())

    def setup(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.save_for_backward(*inputs[:count])
        ctx.options = inputs[count:]

    return setup


def _gradients_of_tensors(ctx: Any, gradients: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    results = gradients(g, *ctx.saved_tensors, *ctx.options)
    return *((results,) if isinstance(results, Tensor) else results), *(None for _ in ctx.options)


def _library_op(name: str, body: Callable[..., Any]) -> Any:
    """A torch.library operator whose kernels torch.compile traces; opaque where the interpreter runs them."""
    if HAS_TRITON and not is_interpreting():
        return triton_op(f"saccade::{name}", traced(body), mutates_args={})
    op = custom_op(f"saccade::{name}", body, mutates_args=())

    def fake(*inputs: Any) -> Any:
        with record_specializations(execute=False):
            return body(*inputs)

    op.register_fake(fake)
    return op


def _autograd_function(name: str, forward: Any, gradients: Any, setup: Any, backward: Any) -> Any:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = forward(*inputs)
            setup(ctx, inputs, output)
            ctx.set_materialize_grads(False)
            return output

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, *g: Tensor) -> Any:
            return backward(ctx, gradients, *g)

    Function.__name__ = Function.__qualname__ = "".join(part.capitalize() for part in name.split("_"))
    return Function


def opaque_op(name: str, forward: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """A torch.library operator that Inductor calls as it is: for calls of cuBLAS and cuDNN that it would decompose."""
    op = custom_op(f"saccade::{name}", forward, mutates_args=())

    def announced_fake(*inputs: Any) -> Any:
        _announce(op._opoverload)
        return fake(*inputs)

    op.register_fake(announced_fake)
    return op


def register_aten_fake(name: str, fake: Callable[..., Any]) -> None:
    """Let torch.compile trace an ATen operator that has no fake implementation; Inductor calls it as it is.

    Inductor may choose the strides of what it hands to ATen operators: the lowering registered here keeps them.
    """
    overload = getattr(torch.ops.aten, name).default

    def announced_fake(*inputs: Any) -> Any:
        _announce(overload, torch._C.Tag.needs_fixed_stride_order)
        return fake(*inputs)

    try:
        torch.library.register_fake(f"aten::{name}", announced_fake)
    except RuntimeError:  # a version of PyTorch that has its own
        return


def _announce(overload: Any, tag: Any = None) -> None:
    """Register an operator with Inductor before it meets it.

    At the first meeting Inductor (up to torch 2.12) formats the chain of nodes that leads to the operator for its log,
    whether that is read or not, and every residual connection doubles it: minutes after the 13 blocks of a ResNet.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    if lowering is None or (tag is None and not _INDUCTOR_WALKS_GRAPH):
        return
    try:
        if overload not in lowering.lowerings:
            from torch._library.utils import get_layout_constraint_tag

            tag = tag or get_layout_constraint_tag(overload, with_default=True)
            lowering.make_fallback(overload, layout_constraint=lowering.tag_to_layout_constraint(tag), warn=False)
    except (AttributeError, ImportError, TypeError):  # another version's: then Inductor formats its log
        return


# Predicates from which `supports` functions are built.


def on_gpu(*tensors: Any) -> bool:
    """Whether Triton kernels support these: tensors (no fx proxies) on a GPU, of a dtype the kernels support."""
    if not HAS_TRITON:
        return False
    devices = _switch["devices"]
    for tensor in tensors:  # a loop: a generator costs twice the time, for every layer of every step
        if not isinstance(tensor, Tensor) or tensor.dtype not in KERNEL_DTYPES or tensor.device.type not in devices:
            return False
    return True


def can_use_cudnn(features: Tensor) -> bool:
    """Whether cuDNN's fused convolutions apply: on an NVIDIA GPU, where results need not repeat bit by bit."""
    wanted = torch.backends.cudnn.enabled and not torch.are_deterministic_algorithms_enabled()
    return HAS_CUDNN and wanted and features.device.type == "cuda"


def on_cpu_inference(features: Any) -> bool:
    """Whether this is eager float32 inference on a CPU, without autocast, tracing or a dispatch mode."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not isinstance(features, Tensor):
        return False
    if features.device.type != "cpu" or features.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return False
    return torch.backends.mkldnn.enabled and not torch.jit.is_tracing() and _get_current_dispatch_mode() is None


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which matrix products with this tensor are computed: autocast's, or its own."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def computes_in_half(tensor: Tensor) -> bool:
    return compute_dtype(tensor) in HALF_DTYPES


def same_half_dtype(*tensors: Tensor) -> bool:
    """Whether these share one half-precision dtype."""
    first = tensors[0].dtype
    return first in HALF_DTYPES and all(tensor.dtype == first for tensor in tensors)


def is_training() -> bool:
    """Whether autograd records the graph; kernels without a backward must not run then."""
    return torch.is_grad_enabled()


def is_compiling() -> bool:
    return torch.compiler.is_compiling()


def may_change_shape() -> bool:
    """Whether the next call may have other sizes: in eager mode, outside `fixed_shapes`."""
    return not torch.compiler.is_compiling() and not _switch["fixed"]


def is_exporting() -> bool:
    """Whether torch.export traces. Reads the flag: `is_exporting()` of torch 2.11 is also true for torch.compile."""
    return bool(getattr(torch.compiler, "_is_exporting_flag", False)) and torch.compiler.is_compiling()


def eager_autocast() -> tuple[str, torch.dtype] | None:
    """Device type and half-precision dtype of autocast in an eager pass on a GPU, outside CUDA graph capture."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or not _switch["on"]:
        return None
    kind = _switch["devices"][-1]
    if not torch.is_autocast_enabled(kind) or (kind == "cuda" and torch.cuda.is_current_stream_capturing()):
        return None
    dtype = torch.get_autocast_dtype(kind)
    return (kind, dtype) if dtype in HALF_DTYPES else None


def autocast_state() -> tuple[bool, torch.dtype]:
    """What a pass on a GPU computes in: whether autocast is on, and its dtype."""
    return torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")


def traced_autocast() -> tuple[str, torch.dtype] | None:
    """Device type and half-precision dtype of autocast where torch.compile traces a program for a GPU."""
    kind = _switch["devices"][-1]
    if not _switch["on"] or not torch.compiler.is_compiling() or is_exporting() or not torch.is_autocast_enabled(kind):
        return None
    dtype = torch.get_autocast_dtype(kind)
    return (kind, dtype) if dtype in HALF_DTYPES else None


def needs_grad(*tensors: Any) -> bool:
    """Whether autograd will compute the gradient of one of these."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                return True
    return False


def needs_determinism() -> bool:
    """Whether results must repeat bit by bit in training: no kernels that add up gradients in any order."""
    return torch.are_deterministic_algorithms_enabled() and torch.is_grad_enabled()


def has_hooks(*modules: nn.Module) -> bool:
    """Whether one of these modules has hooks, and must therefore be called itself."""
    for module in modules:  # noqa: SIM110 (a generator costs twice the time)
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            return True
    return False


def plain_layer(cls: Layer) -> Layer:
    """Class decorator: fused operations may read the parameters of this layer instead of calling it."""
    _plain_layers.add(cls)
    return cls


def is_plain(*modules: nn.Module) -> bool:
    """Whether these are plain layers without hooks; a subclass counts only if registered, since it may do more."""
    return all(type(module) in _plain_layers for module in modules) and not has_hooks(*modules)


def is_channels_last(features: Tensor) -> bool:
    """Whether the channels of a pixel are adjacent in memory: features (B, C, H, W), or rows (N, C)."""
    if features.ndim == 4:
        return features.is_contiguous(memory_format=torch.channels_last)
    return features.ndim == 2 and features.is_contiguous()


# Casts and layouts that skip PyTorch's dispatcher where there is nothing to do.


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """tensor.to(dtype)."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def contiguous_like(tensor: Tensor) -> Tensor:
    """An empty contiguous tensor of this shape and dtype."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def match_layout(gradient: Tensor, tensor: Tensor) -> Tensor:
    """The gradient in the memory order of `tensor`, which is contiguous or channels-last."""
    if tensor.is_contiguous():
        return gradient.contiguous()
    return gradient.contiguous(memory_format=torch.channels_last)
