"""How kernels are started: traced under a compiler, by a short road in eager runs.

Triton's own road binds arguments, describes them and looks a text of all options up at every call: 40 µs and more on
the CPU, where the kernel may take 5 on the GPU. All that is the same when types, numbers and constants are the same
and pointers are aligned, so the compiled kernel is kept by these, and started as Triton's tutorials start one.
"""

import threading
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    from torch.library import wrap_triton

    HAS_TRITON = True
except ImportError:  # CPU-only installs have none
    HAS_TRITON = False

MOST = 4096  # compiled kernels kept by their numbers; a new size of picture makes a few more
_here = threading.local()
_ready: dict[tuple, tuple[Any, tuple]] = {}


class launched_directly:
    """A context outside any compiler: kernels are started, not traced."""

    def __enter__(self) -> None:
        self.before = getattr(_here, "direct", False)
        _here.direct = True

    def __exit__(self, *_) -> None:
        _here.direct = self.before


def launch(kernel, grid: tuple[int, ...], *arguments, **constants) -> None:
    """kernel[grid](*arguments, **constants). Constants come last in the kernel's signature."""
    if getattr(_here, "direct", False):
        start(kernel, grid, *arguments, **constants)
    else:
        _wrap(kernel)[grid](*arguments, **constants)


def start(kernel, grid: tuple[int, ...], *arguments, **constants) -> None:
    """The same where no compiler traces."""
    if not isinstance(kernel, triton.JITFunction):  # interpreted
        kernel[grid](*arguments, **constants)
        return
    device = arguments[0].get_device()
    if device != torch.cuda.current_device():  # where Triton would start it
        with torch.cuda.device(device):
            _start_on(device, kernel, grid, arguments, constants)
    else:
        _start_on(device, kernel, grid, arguments, constants)


def _start_on(device: int, kernel, grid: tuple[int, ...], arguments: tuple, constants: dict[str, Any]) -> None:
    aligned = True
    parts: list[Any] = [id(kernel), device]
    for argument in arguments:
        if isinstance(argument, Tensor):
            aligned = aligned and argument.data_ptr() % 16 == 0
            parts.append(argument.dtype)
        else:
            parts.append(argument)
    key = (*parts, *constants.items())
    found = _ready.get(key) if aligned else None
    if found is not None:
        compiled, rest = found
        compiled[grid + (1,) * (3 - len(grid))](*arguments, *rest)
        return
    compiled = kernel[grid](*arguments, **constants)
    if aligned and compiled is not None:
        if len(_ready) >= MOST:
            _ready.clear()
        _ready[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])


def _wrap(kernel):
    """A kernel as compilers trace it; an interpreted one as it is, where torch (before 2.12) cannot wrap it."""
    try:
        return wrap_triton(kernel)
    except RuntimeError:
        return kernel
