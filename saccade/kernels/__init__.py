"""Fused versions of hot steps, each beside a plain PyTorch twin of the same signature.

In eager runs they are plain autograd functions. They are operators of torch.library too, over the same body, which
compilers trace, and take by themselves (`COMPILED`); `trusted(...)` as a context lets them take fewer.

A kernel is taken on a CUDA device when Triton is there and the tensors suit it; everywhere else its twin runs.
`saccade.kernels.enabled(False)` as a context keeps to the twins, which is how they are compared.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from saccade.kernels.launch import HAS_TRITON

# What compilers may take; benchmarks/check_compiled_training.py checks a model's training with them.
COMPILED = (
    "layer_norm", "depthwise_post", "depthwise", "super_tokens", "short_attention", "place", "sample", "mix", "linear",
    "linear_gelu", "conv_relu", "to_blocks", "few_keys", "stem_conv", "pool", "first_conv", "depthwise_wide",
    "token_attention", "grouped_linear", "pixel_softmax", "averages",
)  # fmt: skip
HALVES = (torch.bfloat16, torch.float16)
WRITTEN_FOR = (torch.float32, *HALVES)
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
    """Let compilers take these kernels and no others, any of `COMPILED`."""
    before = _switch["compiled"]
    _switch["compiled"] = names
    try:
        yield
    finally:
        _switch["compiled"] = before


def allowed(name: str) -> bool:
    """Whether this kernel may be taken here: in eager runs always, under a compiler where it is trusted, in a program
    to be exported, which other machines are to run, never.
    """
    if not torch.compiler.is_compiling():
        return True
    # The flag itself: torch 2.11's `is_exporting()` says yes to every compiler.
    return name in _switch["compiled"] and not getattr(torch.compiler, "_is_exporting_flag", False)


def suits(*tensors: Tensor) -> bool:
    """Whether a kernel can take these: tensors on a GPU, no tracer's, in a dtype the kernels are written for."""
    if not HAS_TRITON or not _switch["on"]:
        return False
    for tensor in tensors:  # asked for every layer of every step: a generator takes longer
        if not isinstance(tensor, Tensor) or not tensor.is_cuda or tensor.dtype not in WRITTEN_FOR:
            return False
    return True


def learns(*tensors: Tensor | None) -> bool:
    """Whether a gradient will be asked for; without one, a kernel is called without autograd's bookkeeping."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def in_type(values: Tensor, dtype: torch.dtype) -> Tensor:
    """values.to(dtype); where they have it already, the dispatcher is not asked."""
    return values if values.dtype == dtype else values.to(dtype)


def contiguous_like(values: Tensor) -> Tensor:
    """As large as these, contiguous, with nothing in it."""
    return torch.empty_like(values, memory_format=torch.contiguous_format)


def in_order_of(x: Tensor, g: Tensor) -> Tensor:
    """g with its values in memory as those of x are: a contiguous tensor, or a map with its channels last."""
    return g.contiguous() if x.is_contiguous() else g.contiguous(memory_format=torch.channels_last)
