"""The linear layer that learns in half precision against the library's in double."""

import pytest
import torch
import torch.nn.functional as F

from saccade.kernels import HAS_TRITON
from saccade.layers import linear as layers
from saccade.layers.linear import Linear, learns_in_half

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is no kernel to compare")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernel runs in Triton's interpreter
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


@pytest.mark.parametrize("shape", [(1, 3), (300, 40), (70, 300), (2500, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("programs", [528, 3])
def test_sums_of_columns(shape, dtype, programs, monkeypatch):
    from saccade.kernels import linear

    monkeypatch.setattr(linear, "PROGRAMS", programs)
    rows = values(*shape).to(dtype)
    exact = rows.double().sum(0)
    assert (linear.column_sum(rows).double() - exact).norm() < 1e-5 * exact.norm()
    assert (linear.column_sum_twin(rows).double() - exact).norm() < 1e-5 * exact.norm()


@pytest.mark.parametrize("autocast", [False, True])
def test_learns_what_the_library_learns(autocast, monkeypatch):
    monkeypatch.setattr(layers, "suits", lambda *_: True)
    monkeypatch.setattr(layers, "MANY", 8)
    layer = Linear(24, 40).to(DEVICE, torch.float32 if autocast else HALF)
    x, g = values(2, 30, 24).to(HALF).requires_grad_(), values(2, 30, 40).to(HALF)
    with torch.autocast(DEVICE, HALF, enabled=autocast):
        assert learns_in_half(layer, x)
        ours = layer(x)
    wanted = [x, layer.weight, layer.bias]
    found = torch.autograd.grad(ours, wanted, g)
    leaves = [value.detach().double().requires_grad_() for value in wanted]
    exact = F.linear(*leaves)
    for a, b in zip([ours, *found], [exact, *torch.autograd.grad(exact, leaves, g.double())], strict=True):
        assert (a.double() - b).norm() < 1e-2 * b.norm()
    assert [value.dtype for value in found] == [value.dtype for value in wanted]


def test_leaves_the_rest_to_the_library(monkeypatch):
    monkeypatch.setattr(layers, "suits", lambda *_: True)
    layer, x = Linear(4, 4).to(HALF), torch.zeros(layers.MANY, 4, dtype=HALF)
    assert learns_in_half(layer, x)
    assert not learns_in_half(layer, x[1:])
    assert not learns_in_half(layer.float(), x.float())
    assert not learns_in_half(Linear(4, 4, bias=False).to(HALF), x)
    assert not learns_in_half(Linear(4, 4).to(HALF).requires_grad_(False), x)
    with torch.no_grad():
        assert not learns_in_half(Linear(4, 4).to(HALF), x)
