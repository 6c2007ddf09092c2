"""Fused versions of hot steps, each beside a plain PyTorch twin of the same signature.

In eager runs they are plain autograd functions. They are operators of torch.library too, over the same body, which
compilers trace; those of them that compiled training has been checked with are taken there by themselves (`COMPILED`),
the others inside `trusted(...)`.

A kernel is taken on a CUDA device when Triton is there and the tensors suit it; everywhere else its twin runs.
`saccade.kernels.enabled(False)` as a context keeps to the twins, which is how they are compared.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

try:
    import triton  # noqa: F401
    from torch._library.triton import set_wrap_triton_enabled
    from torch.library import wrap_triton

    HAS_TRITON = True
except ImportError:  # CPU-only installs have none
    HAS_TRITON = False

COMPILED = ("layer_norm", "depthwise_post")  # forms that compiled training has been checked with, see bench/NOTES.md
_switch = {"on": True, "compiled": COMPILED}


@contextmanager
def enabled(on: bool) -> Iterator[None]:
    """Take the kernels, or keep to their twins, inside the context."""
    before = _switch["on"]
    _switch["on"] = on
    try:
        yield
    finally:
        _switch["on"] = before


@contextmanager
def trusted(*names: str) -> Iterator[None]:
    """Let compilers take these kernels and no others: "layer_norm", "depthwise", "depthwise_post", "super_tokens"."""
    before = _switch["compiled"]
    _switch["compiled"] = names
    try:
        yield
    finally:
        _switch["compiled"] = before


def allowed(name: str) -> bool:
    """Whether this kernel may be taken here: always in eager runs, under a compiler once it is trusted there."""
    return not torch.compiler.is_compiling() or name in _switch["compiled"]


def suits(*tensors: Tensor) -> bool:
    """Whether a kernel can take these: on a GPU, in a dtype the kernels are written for."""
    usable = HAS_TRITON and _switch["on"]
    return usable and all(
        tensor.is_cuda and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) for tensor in tensors
    )


def launched_directly():
    """A context in which `wrap_triton` is no wrapper: outside a compiler its bookkeeping costs half a millisecond."""
    return set_wrap_triton_enabled(False)


def wrap(kernel):
    """A kernel as compilers trace it; an interpreted one as it is, where torch (before 2.12) cannot wrap it."""
    try:
        return wrap_triton(kernel)
    except RuntimeError:
        return kernel
