"""The fused depth-wise convolution against its twin, forward and backward, at odd sizes."""

import pytest
import torch

from saccade.kernels import HAS_TRITON, depthwise

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is no kernel to compare")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernel runs in Triton's interpreter
SIZES = [(2, 16, 9, 7), (1, 40, 3, 30), (1, 8, 20, 3)] + (
    [(3, 256, 56, 56), (2, 130, 33, 61)] if DEVICE == "cuda" else []
)


def inputs(batch, channels, height, width, dtype):
    generator = torch.Generator().manual_seed(batch + channels)
    x, g = (torch.randn(batch, channels, height, width, generator=generator).to(DEVICE, dtype) for _ in range(2))
    x, g = (value.contiguous(memory_format=torch.channels_last) for value in (x, g))
    weight = torch.randn(channels, 1, 3, 3, generator=generator).to(DEVICE).requires_grad_()
    bias = torch.randn(channels, generator=generator).to(DEVICE).requires_grad_()
    return x.requires_grad_(), weight, bias, g


def fused(x, weight, bias, act, shortcut):
    return depthwise._Depthwise.apply(x, weight, bias, depthwise.ACTS[act], shortcut)


def error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("act", depthwise.ACTS)
@pytest.mark.parametrize("shortcut", [True, False])
def test_equals_its_twin_in_float32(size, act, shortcut):
    x, weight, bias, g = inputs(*size, torch.float32)
    ours = fused(x, weight, bias, act, shortcut)
    twin = depthwise.depthwise_twin(x.double(), weight.double(), bias.double(), act, shortcut)
    assert error(ours, twin) < 1e-5
    for a, b in zip(
        torch.autograd.grad(ours, [x, weight, bias], g),
        torch.autograd.grad(twin, [x, weight, bias], g.double()),
        strict=True,
    ):
        assert error(a, b) < 1e-5


@pytest.mark.parametrize("act", depthwise.ACTS)
def test_equals_its_twin_in_bfloat16(act):
    x, weight, bias, g = inputs(*SIZES[-1], torch.bfloat16)
    ours = fused(x, weight, bias, act, True)
    assert ours.dtype == torch.bfloat16
    twin = depthwise.depthwise_twin(x.double(), weight.double(), bias.double(), act, True)
    assert error(ours, twin) < 1e-2
    for a, b in zip(
        torch.autograd.grad(ours, [x, weight, bias], g),
        torch.autograd.grad(twin, [x, weight, bias], g.double()),
        strict=True,
    ):
        assert error(a, b) < 1e-2


def test_the_twin_runs_where_no_kernel_can():
    x, weight, bias, _ = inputs(1, 8, 5, 5, torch.float64)
    assert torch.equal(
        depthwise.depthwise(x, weight.double(), bias.double(), "pre"),
        depthwise.depthwise_twin(x, weight.double(), bias.double(), "pre"),
    )


def test_the_operator_that_compilers_trace_is_the_same_kernel():
    x, weight, bias, g = inputs(*SIZES[0], torch.float32)
    eager = depthwise._Depthwise.apply(x, weight, bias, 1, True)
    operator = depthwise._op(x.permute(0, 2, 3, 1), weight, bias, 1, True).permute(0, 3, 1, 2)
    assert error(eager, operator) < 1e-6  # the library's GELU may go over a map in another order
    for a, b in zip(
        torch.autograd.grad(eager, [x, weight, bias], g),
        torch.autograd.grad(operator, [x, weight, bias], g),
        strict=True,
    ):
        assert error(a, b) < 1e-6
