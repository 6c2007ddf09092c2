"""Grouped products against the library, forward and backward, at odd sizes."""

import pytest
import torch

from saccade.kernels import HAS_TRITON
from saccade.kernels import grouped_linear as kernels
from saccade.kernels.launch import forget_plans
from saccade.layers import linear
from saccade.layers.linear import FoldedLinearNorm, GroupedLinear

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is no kernel to compare")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernel runs in Triton's interpreter
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # which NumPy, and so the interpreter, has
SIZES = [(50, 2, 16, 16), (7, 3, 20, 40), (130, 1, 33, 17)]  # rows, groups, channels of a group in and out
LARGE = [(25088, 16, 64, 128), (25000, 16, 64, 64), (2048, 8, 128, 128)] if DEVICE == "cuda" else []
CASES = [(size, torch.float32, 1e-5) for size in SIZES] + [(size, HALF, 1e-2) for size in SIZES + LARGE]


def values(rows, groups, inputs, outputs, dtype):
    generator = torch.Generator().manual_seed(rows)
    shapes = (rows, groups * inputs), (groups, inputs, outputs), (groups * outputs,), (rows, groups * outputs)
    x, weight, bias, g = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes)
    return x.requires_grad_(), weight.requires_grad_(), bias, g


def error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize(("size", "dtype", "most"), CASES)
def test_equals_its_twin_there_and_back(size, dtype, most):
    x, weight, bias, g = values(*size, dtype)
    ours = kernels._Grouped.apply(x, weight)
    exact = kernels.grouped_linear_twin(x.double(), weight.double(), None)
    assert ours.dtype == dtype
    assert error(ours, exact) < most
    assert error(kernels._multiply(x.detach(), weight.detach(), bias), exact + bias.double()) < most
    found = torch.autograd.grad(ours, [x, weight], g), torch.autograd.grad(exact, [x, weight], g.double())
    for a, b in zip(*found, strict=True):
        assert a.dtype == dtype
        assert error(a, b) < most


def test_programs_that_share_the_rows_add_up(monkeypatch):
    x, weight, _, g = values(150, 2, 16, 32, torch.float32)
    found = []
    for programs in (1, 100):
        monkeypatch.setattr(kernels, "PROGRAMS", programs)
        forget_plans()
        found.append(kernels._gradients(g, x.detach(), weight.detach())[1])
    forget_plans()
    assert error(*found) < 1e-6


def test_the_operator_is_sound():
    x, weight, bias, _ = values(9, 2, 16, 16, torch.float32)
    torch.library.opcheck(kernels._op, (x, weight, bias.requires_grad_()))
    torch.library.opcheck(kernels._op, (x, weight, None))


def test_narrow_means_narrow():
    def narrow(inputs=64, outputs=64, rows=None):
        rows = torch.empty(4, 2 * inputs) if rows is None else rows
        return kernels.are_narrow(rows, torch.empty(2, inputs, outputs))

    assert all((narrow(), narrow(16, 128)))
    assert not any((narrow(8), narrow(64, 129), narrow(rows=torch.empty(128, 4).t())))


@pytest.fixture
def anywhere(monkeypatch):
    """Take the kernel on any device, in any type, and count."""
    calls = []
    monkeypatch.setattr(linear, "suits_whole", lambda vectors: True)
    monkeypatch.setattr(linear, "in_use", lambda vectors: torch.float32)
    monkeypatch.setattr(linear, "grouped_linear", lambda *given: calls.append(1) or kernels.grouped_linear(*given))
    return calls


def test_a_layer_takes_it_and_says_the_same(anywhere):
    torch.manual_seed(0)
    layer, vectors = GroupedLinear(32, 64, 2).to(DEVICE), torch.randn(2, 9, 32, device=DEVICE)
    exact = torch.einsum("bngc,gcd->bngd", vectors.unflatten(2, (2, -1)), layer.weight).flatten(2)
    assert error(layer(vectors), exact) < 1e-5
    assert anywhere == [1]


@torch.no_grad()
def test_with_fixed_statistics_the_bias_is_inside(anywhere, monkeypatch):
    torch.manual_seed(0)
    layer, vectors = FoldedLinearNorm(32, 64, 2).to(DEVICE).eval(), torch.randn(2, 9, 32, device=DEVICE)
    layer.norm.bn.running_mean.normal_()
    layer.norm.bn.running_var.uniform_(0.5, 2)
    ours = layer(vectors)
    assert anywhere == [1]
    monkeypatch.setattr(linear, "suits_whole", lambda vectors: False)
    assert error(ours, layer(vectors)) < 1e-5
    assert anywhere == [1]
