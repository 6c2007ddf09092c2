"""Averages of pixels in fours against the library, forward and backward, at odd sizes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from saccade.kernels import HAS_TRITON
from saccade.kernels import averages as kernels
from saccade.tokens import clusters
from saccade.tokens.clusters import ClusterTokenizer, LinearClustering

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is no kernel to compare")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernel runs in Triton's interpreter
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # which NumPy, and so the interpreter, has
SIZES = [(2, 100, 196, 48), (3, 5, 12, 20), (1, 1, 4, 1), (2, 130, 36, 70)]
if DEVICE == "cuda":
    SIZES += [(128, 100, 196, 320), (2, 64, 1764, 96), (1, 100, 4092, 33)]


def error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()


def both(batch, tokens, count, channels, dtype, seed=0):
    """Answers and gradients of kernel and twin, the twin's in float64."""
    generator = torch.Generator().manual_seed(seed)
    assignment = torch.randn(batch, tokens, count, generator=generator).softmax(-1).to(DEVICE, dtype).requires_grad_()
    pixels = torch.randn(batch, count, channels, generator=generator).to(DEVICE, dtype).requires_grad_()
    g = torch.randn(batch, tokens, channels, generator=generator).to(DEVICE, dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in (assignment, pixels)]
    ours, theirs = kernels._Averages.apply(assignment, pixels), kernels.averages_twin(*exact)
    back = torch.autograd.grad(ours, (assignment, pixels), g)
    return (ours, *back), (theirs, *torch.autograd.grad(theirs, exact, g.double()))


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (HALF, 1e-2)])
@pytest.mark.parametrize("size", SIZES)
def test_equals_its_twin_there_and_back(size, dtype, most):
    ours, theirs = both(*size, dtype)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == dtype
        assert a.is_contiguous()
        assert error(a, b) < most


@settings(max_examples=12, deadline=None)
@given(
    batch=some.integers(1, 3), tokens=some.integers(1, 40), fours=some.integers(1, 20), channels=some.integers(1, 40)
)
def test_any_size_will_do(batch, tokens, fours, channels):
    ours, theirs = both(batch, tokens, 4 * fours, channels, torch.float32)
    assert max(map(error, ours, theirs)) < 1e-5


def test_the_operator_is_sound():
    assignment = torch.randn(2, 3, 4, requires_grad=True, device=DEVICE)
    torch.library.opcheck(kernels._op, (assignment, torch.randn(2, 4, 5, requires_grad=True, device=DEVICE)))


def test_only_where_the_library_is_slow():
    def fit(count, dtype=HALF, other=HALF):
        return kernels.are_fours(torch.empty(2, 3, count, dtype=dtype), torch.empty(2, count, 8, dtype=other))

    assert fit(196)
    assert fit(4)
    assert not any(fit(count) for count in (0, 49, 784, 3136, kernels.LONGEST + 4))
    assert not fit(196, torch.float32, torch.float32)
    assert not fit(196, HALF, torch.float32)


def test_a_compiler_takes_it():
    run = torch.compile(kernels.averages, backend="aot_eager", fullgraph=True)
    assignment, pixels = torch.randn(2, 3, 4, device=DEVICE), torch.randn(2, 4, 5, device=DEVICE)
    torch.testing.assert_close(run(assignment, pixels), assignment @ pixels, rtol=1e-5, atol=1e-5)


def test_a_tokenizer_takes_it_and_says_the_same(monkeypatch):
    torch.manual_seed(0)
    tokenizer = ClusterTokenizer(16, LinearClustering(16, 5)).to(DEVICE, HALF)
    features = torch.randn(2, 16, 2, 6, device=DEVICE, dtype=HALF, requires_grad=True)
    taken = []
    monkeypatch.setattr(clusters, "averages", lambda *given: taken.append(1) or kernels.averages(*given))

    def learn():
        tokens, _, _ = tokenizer(features)
        return tokens, torch.autograd.grad(tokens.float().square().sum(), features)[0]

    monkeypatch.setattr(clusters, "suits", lambda *tensors: False)
    plain = learn()
    monkeypatch.setattr(clusters, "suits", lambda *tensors: True)
    ours = learn()
    assert taken == [1]
    for a, b in zip(ours, plain, strict=True):
        assert error(a, b) < 1e-2
