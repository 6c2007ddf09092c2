"""Compare an operation with its reference: on a GPU where there is one, else in Triton's interpreter."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade import ops
from saccade.ops._launch import HAS_TRITON

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no bfloat16 products
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


@contextmanager
def kernels_allowed() -> Iterator[None]:
    """Kernels run on `DEVICE`: by themselves on a GPU, interpreted on a CPU; backward in this thread, as on a CPU."""
    with ops.interpreted() if DEVICE == "cpu" else nullcontext(), torch.autograd.set_multithreading_enabled(False):
        yield


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def relative_error(result: Tensor, expected: Tensor) -> float:
    norm = expected.double().norm()
    return float((result.double() - expected.double()).norm() / norm) if norm > 0 else float(result.double().norm())


def check(
    op: Any, *inputs: Any, tolerance: float | None = None, implementation: str = "triton", backward: bool = True
) -> None:
    """Assert that `implementation` is chosen, and that outputs and gradients agree with the float64 reference."""
    tensors = [value for value in inputs if isinstance(value, Tensor) and value.is_floating_point()]
    tolerance = TOLERANCE[tensors[0].dtype] if tolerance is None else tolerance
    with kernels_allowed():
        with torch.set_grad_enabled(backward):
            assert op.implementation(*inputs) == implementation
        results = outputs_and_gradients(op, inputs, backward)
    doubled = [
        value.detach().double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for value in inputs
    ]
    expected = outputs_and_gradients(op.reference, doubled, backward)
    assert len(results) == len(expected)
    for result, reference in zip(results, expected, strict=True):
        assert result.shape == reference.shape
        error = relative_error(result, reference)
        assert error <= tolerance, f"relative error {error:.2e}, expected at most {tolerance:.0e}"


def outputs_and_gradients(function: Callable[..., Any], inputs: Sequence[Any], backward: bool) -> list[Tensor]:
    """Outputs of the function, then the gradients of its float inputs for fixed output gradients."""
    inputs = [
        value.detach().clone(memory_format=torch.preserve_format).requires_grad_(backward)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for value in inputs
    ]
    with torch.set_grad_enabled(backward):
        outputs = function(*inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    if not backward:
        return outputs
    trained = [output for output in outputs if output.requires_grad]
    g = [randn(*output.shape, seed=7).to(output.dtype) for output in trained]
    leaves = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    gradients = torch.autograd.grad(trained, leaves, g, allow_unused=True)
    return [output.detach() for output in outputs] + [g for g in gradients if g is not None]
