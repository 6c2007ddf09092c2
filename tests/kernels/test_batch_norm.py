"""Batch norm of training with its sum and ReLU against the library's, forward, backward and running statistics."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.kernels import HAS_TRITON
from saccade.kernels.batch_norm import batch_norm_twin

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is no kernel to compare")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernel runs in Triton's interpreter


def compare(
    rows: int, channels: int, relu: bool, shortcut: bool, dtype=torch.float32, tolerance=1e-5, level=1.0, gelu=False
):
    from saccade.kernels.batch_norm import batch_norm

    generator = torch.Generator().manual_seed(rows)

    def values(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE)

    leaves = [values(rows, channels).add(level).to(dtype), values(channels), values(channels)]
    leaves += [values(rows, channels).to(dtype)] if shortcut else []
    g = values(rows, channels).to(dtype)
    mean, variance = values(channels), values(channels).square()

    def run(function, type_of):
        inputs = [leaf.to(type_of(leaf)).requires_grad_() for leaf in leaves]
        running = mean.to(type_of(mean), copy=True), variance.to(type_of(variance), copy=True)
        y = function(*inputs[:3], running, 0.1, 1e-5, relu, inputs[3] if shortcut else None, gelu)
        return y.detach(), *torch.autograd.grad(y, inputs, g.to(y.dtype)), *running

    ours = run(batch_norm, lambda tensor: tensor.dtype)
    # Not with the library in the same type: it rounds the norm before the sum, so that a sum near zero (4 in 10 000
    # of bfloat16) falls on the other side of the ReLU, and gradients are 2 % away from the exact ones.
    exact = run(batch_norm_twin, lambda tensor: torch.float64)
    for a, b in zip(ours, exact, strict=True):
        assert (a.double() - b.double()).norm() <= tolerance * b.double().norm()


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shortcut", [False, True])
@pytest.mark.parametrize(("rows", "channels"), [(300, 40), (70, 300)])
def test_equals_the_library(rows, channels, relu, shortcut):
    compare(rows, channels, relu, shortcut)


@settings(max_examples=8, deadline=None)
@given(st.integers(6, 200), st.integers(1, 140), st.booleans(), st.booleans())
def test_equals_the_library_at_any_size(rows, channels, relu, shortcut):
    compare(rows, channels, relu, shortcut)


@pytest.mark.parametrize("rows", [40, 700])
def test_a_gelu_in_front_of_it(rows):
    compare(rows, 40, False, False, gelu=True)


def test_again_is_the_same():
    from saccade.kernels.batch_norm import batch_norm_again

    x, weight, bias = torch.randn(50, 12, device=DEVICE), torch.randn(12, device=DEVICE), torch.randn(12, device=DEVICE)
    running = torch.zeros(12, device=DEVICE), torch.ones(12, device=DEVICE)
    y, again = batch_norm_again(x, weight, bias, running, 0.1, 1e-5)
    running[0].add_(5)  # what later batches do
    torch.testing.assert_close(again(), y, rtol=0, atol=0)


@pytest.mark.parametrize("shortcut", [False, True])
def test_a_value_that_is_not_finite_shows(shortcut):
    from saccade.kernels.batch_norm import batch_norm

    x = torch.randn(20, 3, device=DEVICE)
    x[4, 1] = float("nan")
    other = torch.zeros_like(x) if shortcut else None
    one = torch.ones(3, device=DEVICE)
    y = batch_norm(x, one, one, (one.clone(), one.clone()), 0.1, 1e-5, True, other)
    assert y[:, 1].isnan().all()
    assert y[:, [0, 2]].isfinite().all()


def test_many_rows_are_walked_over(monkeypatch):
    from saccade.kernels import batch_norm

    monkeypatch.setattr(batch_norm, "PROGRAMS", 3)
    compare(1500, 20, True, True)


def test_a_mean_far_from_zero_costs_no_digits():
    compare(300, 16, False, False, level=1000.0, tolerance=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shortcut", [False, True])
def test_half_precision(shortcut, dtype):
    compare(5000, 64, True, shortcut, dtype, 1e-2 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("size", [(2, 12, 5, 3), (3, 16, 1, 1), (4, 1, 3, 2)])
def test_a_map_is_its_rows_and_the_batches_are_counted(size):
    from saccade.kernels.batch_norm import batch_norm

    generator = torch.Generator().manual_seed(sum(size))
    x, g = (torch.randn(size, generator=generator).to(DEVICE) for _ in range(2))
    features = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    weight, bias = (torch.randn(size[1], generator=generator).to(DEVICE).requires_grad_() for _ in range(2))

    def run(function, values):
        running = torch.zeros(size[1], device=DEVICE), torch.ones(size[1], device=DEVICE)
        seen = torch.tensor(3, device=DEVICE)
        y = function(values, weight, bias, running, 0.1, 1e-5, True, values.detach(), False, seen)
        assert seen == 4
        return y, *torch.autograd.grad(y, [values, weight, bias], g), *running  # g is not channels-last

    ours, theirs = run(batch_norm, features), run(batch_norm_twin, x.requires_grad_())
    assert ours[0].stride() == features.stride()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_computed_again_it_is_the_same():
    from saccade.kernels.batch_norm import batch_norm_again

    x = torch.randn(2, 12, 5, 3, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    ones, zeros = torch.ones(12, device=DEVICE), torch.zeros(12, device=DEVICE)
    y, again = batch_norm_again(x, ones, zeros, (zeros.clone(), ones.clone()), 0.1, 1e-5)
    assert torch.equal(y, again())
