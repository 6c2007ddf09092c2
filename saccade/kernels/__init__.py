"""Fused versions of hot steps, each beside a plain PyTorch twin of the same signature.

In eager runs they are plain autograd functions; those that have proven themselves in compiled training are operators
of torch.library too, over the same body, which compilers and exporters trace.

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

    HAS_TRITON = True
except ImportError:  # CPU-only installs have none
    HAS_TRITON = False

_switch = {"on": True}


@contextmanager
def enabled(on: bool) -> Iterator[None]:
    """Take the kernels, or keep to their twins, inside the context."""
    before = _switch["on"]
    _switch["on"] = on
    try:
        yield
    finally:
        _switch["on"] = before


def suits(*tensors: Tensor) -> bool:
    """Whether a kernel can take these: on a GPU, in a dtype the kernels are written for."""
    usable = HAS_TRITON and _switch["on"]
    return usable and all(
        tensor.is_cuda and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) for tensor in tensors
    )


def launched_directly():
    """A context in which `wrap_triton` is no wrapper: outside a compiler its bookkeeping costs half a millisecond."""
    return set_wrap_triton_enabled(False)
