"""Launch Triton kernels: traced by torch.compile, with little CPU time in eager runs.

Triton's own launch path binds and describes the arguments, builds a cache key and calls lists of hooks at every call:
40 µs of CPU time and more (Triton 3.6, H200 host), for kernels that run for 5 µs. All of it depends only on dtypes,
constants and pointer alignment, so a `Kernel` caches the compiled binary per device and dtypes and calls its launcher.

Nothing is compiled per image or batch size: sizes are run-time arguments that Triton must not specialise on (by
default it compiles variants for integers that are 1 or divisible by 16). `jit` sees to that.

Parameters of a kernel come in this order: pointers, named `*_ptr`; sizes; constants (`tl.constexpr`).
"""

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import lru_cache, reduce, wraps
from operator import attrgetter, or_
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

try:
    import triton
    from torch.library import wrap_triton
    from triton import knobs

    HAS_TRITON = True
except ImportError:  # CPU-only installs come without it
    HAS_TRITON = False

MAX_VARIANTS = 1024  # cached per builder of variants
MAX_INT32 = 2**31 - 1
TRACED_OPTIONS = ("num_warps", "num_stages")  # that Dynamo accepts in a launch; not `maxnreg`
T = TypeVar("T")
KERNELS: dict[str, Any] = {}  # every kernel that is launched from Python, by name
_data_ptr, _dtype = Tensor.data_ptr, attrgetter("dtype")
# The same as torch.cuda's functions, without their check whether CUDA is initialised: the tensors are on it already.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Specialization(NamedTuple):
    """What Triton compiles one binary for."""

    kernel: str
    dtypes: tuple[torch.dtype, ...]
    constants: tuple[tuple[str, Any], ...]


class _State(threading.local):
    tracing = False  # inside the body of a torch.library operator
    record: set[Specialization] | None = None
    execute = True


_state = _State()


def is_interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter (TRITON_INTERPRET=1)."""
    return HAS_TRITON and bool(knobs.runtime.interpret)


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit` for kernels that are launched from Python: no specialisation on sizes.

    Kernels that pyright cannot check (Triton declares neither indexing of tiles nor loops over `static_range`) have
    the decorator `no_type_check` below this one; it does nothing at run time.
    """
    sizes = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if not name.endswith("_ptr") and "constexpr" not in str(parameter.annotation)
    ]
    if function.__name__ in KERNELS:
        raise ValueError(f"two kernels are named {function.__name__}: rename one, specialisations are told by name.")
    decorate: Any = triton.jit  # whose overloads do not admit the keyword together with a function
    KERNELS[function.__name__] = kernel = decorate(function, do_not_specialize=sizes)
    return kernel


def traced(body: Callable[..., T]) -> Callable[..., T]:
    """Let torch.compile trace the kernels that the body of a torch.library operator launches."""

    @wraps(body)
    def operator(*args: Any, **kwargs: Any) -> T:
        before, _state.tracing = _state.tracing, True
        try:
            return body(*args, **kwargs)
        finally:
            _state.tracing = before

    return operator


def variant(build: Callable[..., T]) -> Callable[..., T]:
    """Cache what a function of channel counts, dtypes and flags builds: a `Kernel`, mostly.

    Under torch.compile integers may be symbols; channel counts are specialised to their value.
    """
    cached = lru_cache(MAX_VARIANTS)(build)

    @wraps(build)
    def get(*key: Any) -> T:
        try:
            return cached(*key)
        except TypeError:  # a symbol cannot be hashed
            return cached(*(int(value) if isinstance(value, torch.SymInt) else value for value in key))

    return get


@contextmanager
def record_specializations(execute: bool = True) -> Iterator[set[Specialization]]:
    """Collect what the launches inside would compile; `execute=False` launches nothing and leaves outputs undefined."""
    before = _state.record, _state.execute
    _state.record, _state.execute = set(), execute
    try:
        yield _state.record
    finally:
        _state.record, _state.execute = before


def collects_specializations() -> bool:
    """Whether launches are collected, in order to compile their kernels for all sizes in advance."""
    return _state.record is not None


class Kernel:
    """A Triton kernel with its constants bound: `kernel(grid, *tensors, *sizes)`."""

    __slots__ = ("constants", "function", "is_jit", "launchers", "num_tensors", "traced_constants", "trailing")

    def __init__(self, function: Any, **constants: Any):
        names = list(inspect.signature(function.fn).parameters)
        self.function, self.constants = function, constants
        self.is_jit = isinstance(function, triton.JITFunction)  # otherwise interpreted
        self.num_tensors = sum(name.endswith("_ptr") for name in names)
        self.trailing = tuple(constants[name] for name in names if name in constants)
        self.traced_constants = {
            name: value for name, value in constants.items() if name in names or name in TRACED_OPTIONS
        }
        self.launchers: dict[tuple, tuple] = {}

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        if _state.tracing:
            wrap_triton(self.function)[grid](*arguments, **self.traced_constants)
            return
        if _state.record is not None:
            dtypes = tuple(map(_dtype, arguments[: self.num_tensors]))
            _state.record.add(Specialization(self.function.fn.__name__, dtypes, tuple(self.constants.items())))
        if 0 in grid or not _state.execute:  # an empty batch
            return
        if not self.is_jit:
            self.function[grid](*arguments, **self.constants)
            return
        tensors, sizes = arguments[: self.num_tensors], arguments[self.num_tensors :]
        device, pointers = tensors[0].get_device(), [*map(_data_ptr, tensors)]
        if device != _current_device() and device >= 0:  # where Triton would launch; it refuses CPU tensors itself
            with torch.cuda.device(device):
                return self(grid, *arguments)
        key = device, *map(_dtype, tensors)
        launcher = self.launchers.get(key)
        # The compiled kernel relies on aligned pointers and 32-bit sizes.
        usual = reduce(or_, pointers) % 16 == 0 and (not sizes or max(sizes) <= MAX_INT32)
        if launcher is None and not self.launchers:
            before_first_compilation()
        if launcher is None or not usual or _has_launch_hooks():
            compiled = self.function[grid](*arguments, **self.constants)
            if usual and compiled is not None:
                self.launchers[key] = (*_direct_launch(compiled), compiled)  # the kernel lives as long as its launcher
            return
        launch, leading, _ = launcher
        x, y, z = grid + (1,) * (3 - len(grid))
        launch(x, y, z, _current_stream(device), *leading, *pointers, *sizes, *self.trailing)


def before_first_compilation() -> None:
    """Called before a kernel is compiled; replaced by `_model_pass`."""


def compile_in(threads: Executor, variants: Iterable[Specialization]) -> None:
    """Compile these in parallel, as their launches would, and wait for them. Without support by Triton do nothing."""
    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None:
        return
    with mode(threads, ignore_errors=True):
        for variant in variants:
            function, constants = KERNELS[variant.kernel], dict(variant.constants)
            sizes = sum(not name.endswith("_ptr") and name not in constants for name in function.arg_names)
            function.warmup(*variant.dtypes, *[1] * sizes, grid=(1,), **constants)


def _direct_launch(compiled: Any) -> tuple[Callable[..., None], tuple]:
    """What launches a compiled kernel, called with grid, stream, the second value returned, and the arguments.

    Triton 3.6 needs no more than a call into C for kernels without scratch memory; later versions pass the arguments
    another way, and are called through their launcher object.
    """
    try:
        run, no_hooks = compiled.run, (None, None, None)
        function, metadata = compiled.function, compiled.packed_metadata
    except AttributeError:  # other names in another version: the public path
        return lambda x, y, z, _, *arguments: compiled[x, y, z](*arguments), ()
    try:
        bare = not hasattr(run, "arg_annotations") and run.global_scratch_size == run.profile_scratch_size == 0
        switches = run.launch_cooperative_grid, run.launch_pdl
    except AttributeError:  # of another device or version
        return run, (function, metadata, *no_hooks)
    if bare and type(run).__name__ == "CudaLauncher":
        return run.launch, (function, *switches, None, None, metadata, *no_hooks)
    return run, (function, metadata, *no_hooks)


def _has_launch_hooks() -> bool:
    """Whether a profiler wants to know more about launches than the direct path tells it."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def cdiv(size: int, block: int) -> int:
    """Number of blocks that cover a size. (Triton's own is a kernel function, and takes microseconds in Python.)"""
    return (size + block - 1) // block


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`, by comparisons alone, so that symbols go through."""
    power = 1
    while power < number:
        power *= 2
    return power
