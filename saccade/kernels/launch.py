"""How kernels are started: traced under a compiler, by a short road in eager runs.

Triton's own road binds arguments, describes them, looks a text of all options up, asks the driver about every pointer
and calls lists of hooks that are empty, at every call: 40 µs and more on the CPU, where the kernel may take 5 on the
GPU. All that is the same when sizes, types and constants are the same and pointers are aligned. So whoever has a kernel
keeps a `Launch` for every size it meets (`planned`), which keeps the compiled kernel for every type it meets.
"""

import threading
from collections.abc import Callable
from functools import lru_cache, reduce, wraps
from operator import attrgetter, or_
from typing import Any, TypeVar

import torch
from torch import Tensor

try:
    import triton
    from torch.library import wrap_triton
    from triton import knobs

    HAS_TRITON = True
except ImportError:  # CPU-only installs have none
    HAS_TRITON = False

MOST = 1024  # plans that are kept of a kind; a new size of picture makes a few more
Made = TypeVar("Made")
_plans: list[Any] = []
_pointer, _kind = Tensor.data_ptr, attrgetter("dtype", "device")
# The same as torch.cuda's, which look first whether CUDA has been started: here there are tensors on it already.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class _Here(threading.local):
    traced = False


_here = _Here()


def traced(body: Callable[..., Made]) -> Callable[..., Made]:
    """The body of an operator of torch.library: in it kernels are started such that a compiler can follow."""

    @wraps(body)
    def operator(*args, **kwargs):
        before, _here.traced = _here.traced, True
        try:
            return body(*args, **kwargs)
        finally:
            _here.traced = before

    return operator


def planned(make: Callable[..., Made]) -> Callable[..., Made]:
    """A function of sizes, types and switches whose answers are kept; a compiler's sizes may be symbols: theirs not."""
    kept = lru_cache(MOST)(make)
    _plans.append(kept)

    @wraps(make)
    def plan(*sizes):
        return make(*sizes) if _here.traced else kept(*sizes)

    return plan


def forget_plans() -> None:
    """For those who change what plans are made of, such as tiles."""
    for kept in _plans:
        kept.cache_clear()


class Launch:
    """A kernel with all that it takes but its tensors. They come first in its signature, then numbers, then constants.

    grid: programs along one to three axes. Called with the tensors, all on one device.
    """

    __slots__ = ("compiled", "constants", "grid", "jitted", "kernel", "numbers")

    def __init__(self, kernel, grid: tuple[int, ...], *numbers: float, **constants: Any):
        self.kernel, self.grid, self.numbers, self.constants = kernel, grid, numbers, constants
        self.jitted = isinstance(kernel, triton.JITFunction)  # or interpreted
        self.compiled: dict[tuple, tuple] = {}

    def __call__(self, *tensors: Tensor) -> None:
        if _here.traced or not self.jitted:
            kernel = _wrap(self.kernel) if _here.traced else self.kernel
            kernel[self.grid](*tensors, *self.numbers, **self.constants)
            return
        device, pointers = tensors[0].get_device(), [*map(_pointer, tensors)]
        if device != _current_device() and device >= 0:  # where Triton would start it; it says no to tensors of a CPU
            with torch.cuda.device(device):
                return self(*tensors)
        kind = device, *map(_kind, tensors)
        found = self.compiled.get(kind)
        aligned = reduce(or_, pointers) % 16 == 0  # what the compiled kernel takes for granted
        if found is None or not aligned or _heard():
            compiled = self.kernel[self.grid](*tensors, *self.numbers, **self.constants)
            if aligned and compiled is not None:
                self.compiled[kind] = self.shorten(compiled, len(tensors))
            return
        start, x, y, z, ahead, rest, _ = found
        start(x, y, z, _current_stream(device), *ahead, *pointers, *rest)

    def shorten(self, compiled, count: int) -> tuple:
        """What to call, the grid, what stands before pointers and behind them; and the kernel, so that it lives on."""
        names = self.kernel.arg_names[count + len(self.numbers) :]
        rest = (*self.numbers, *(self.constants[name] for name in names))
        x, y, z = self.grid + (1,) * (3 - len(self.grid))
        start, ahead = _direct(compiled)
        return start, x, y, z, ahead, rest, compiled


def start(kernel, grid: tuple[int, ...], *arguments, **constants) -> None:
    """kernel[grid](*arguments, **constants), for those who start it so rarely that they keep no plan of their own."""
    numbers = tuple(argument for argument in arguments if not isinstance(argument, Tensor))
    _started(kernel, grid, numbers, tuple(constants.items()))(*arguments[: len(arguments) - len(numbers)])


@planned
def _started(kernel, grid: tuple[int, ...], numbers: tuple, constants: tuple) -> Launch:
    return Launch(kernel, grid, *numbers, **dict(constants))


def _direct(compiled) -> tuple[Callable[..., None], tuple]:
    """What starts a compiled kernel, called with grid, stream, what comes back here as well, and the arguments.

    No data for hooks and no hooks: see `_heard`. Without scratch memory, which only some kernels of others want,
    Triton 3.6 leaves nothing else to do than calling into C; later ones take the arguments there in other ways.
    """
    try:
        run, silent = compiled.run, (None, None, None)
        function, described = compiled.function, compiled.packed_metadata
    except AttributeError:  # a Triton that names them otherwise
        return lambda x, y, z, _, *arguments: compiled[x, y, z](*arguments), ()
    try:
        bare = not hasattr(run, "arg_annotations") and run.global_scratch_size == run.profile_scratch_size == 0
        switches = run.launch_cooperative_grid, run.launch_pdl
    except AttributeError:  # of another device or version
        bare = False
    if bare and type(run).__name__ == "CudaLauncher":
        return run.launch, (function, *switches, None, None, described, *silent)
    return run, (function, described, *silent)


def _heard() -> bool:
    """Whether somebody listens to launches, a profiler of Triton's: it wants to know more than the short road says."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _wrap(kernel):
    """A kernel as compilers trace it; an interpreted one as it is, where torch (before 2.12) cannot wrap it."""
    try:
        return wrap_triton(kernel)
    except RuntimeError:
        return kernel
