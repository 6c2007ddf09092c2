"""Softmax over pixels against the library, forward and backward, at odd lengths."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from saccade.kernels import HAS_TRITON
from saccade.kernels import pixel_softmax as kernels
from saccade.tokens import clusters
from saccade.tokens.clusters import ClusterTokenizer, LinearClustering

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is no kernel to compare")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernel runs in Triton's interpreter
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # which NumPy, and so the interpreter, has
LENGTHS = [1, 5, 16, 49, 196] + ([3136, 16384] if DEVICE == "cuda" else [])


def error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (HALF, 1e-2)])
@pytest.mark.parametrize("length", LENGTHS)
def test_equals_its_twin_there_and_back(length, dtype, most):
    torch.manual_seed(length)
    scores = (3 * torch.randn(2, 3, length, device=DEVICE)).to(dtype).requires_grad_()
    g = torch.randn(2, 3, length, device=DEVICE).to(dtype)
    ours, exact = kernels._Softmax.apply(scores), kernels.pixel_softmax_twin(scores.double())
    assert (ours.dtype, ours.stride()) == (dtype, (3 * length, length, 1))
    assert error(ours, exact) < most
    (back,), (exact_back,) = torch.autograd.grad(ours, scores, g), torch.autograd.grad(exact, scores, g.double())
    assert (back - exact_back).abs().max() < most * g.abs().max()


@settings(max_examples=20, deadline=None)
@given(length=some.integers(1, 300), height=some.floats(-200, 200), seed=some.integers(0, 9))
def test_rows_sum_to_one_however_high_the_scores(length, height, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = (50 * torch.randn(2, 2, length, generator=generator) + height).to(DEVICE)
    found = kernels.pixel_softmax(scores)
    assert (found.sum(-1) - 1).abs().max() < 1e-5
    assert found.min() >= 0


def test_the_operator_is_sound():
    torch.library.opcheck(kernels._op, (torch.randn(2, 3, 5, requires_grad=True, device=DEVICE),))


def test_a_compiler_takes_it():
    run = torch.compile(kernels.pixel_softmax, backend="aot_eager", fullgraph=True)
    scores = torch.randn(2, 3, 12, device=DEVICE)
    assert run(scores).stride() == (36, 12, 1)
    assert torch.equal(run(scores), kernels._softmax(scores))


def test_a_gradient_takes_the_answer_as_it_comes():
    """In whatever order a compiler hands it on."""
    scores, g = torch.randn(2, 3, 12, device=DEVICE), torch.randn(2, 3, 12, device=DEVICE)
    found = kernels._softmax(scores)
    assert torch.equal(
        kernels._gradient(g, found),
        kernels._gradient(
            g.transpose(0, 1).contiguous().transpose(0, 1), found.transpose(1, 2).contiguous().transpose(1, 2)
        ),
    )


def test_long_rows_are_left_to_the_library():
    assert kernels.is_held(torch.empty(1, 2, kernels.LONGEST))
    for scores in (torch.empty(1, 2, kernels.LONGEST + 1), torch.empty(2, 3, 4).transpose(1, 2), torch.empty(0, 3, 4)):
        assert not kernels.is_held(scores)


def test_a_tokenizer_takes_it_and_says_the_same(monkeypatch):
    torch.manual_seed(0)
    tokenizer = ClusterTokenizer(16, LinearClustering(16, 5)).to(DEVICE)
    features = torch.randn(2, 16, 3, 3, device=DEVICE, requires_grad=True)

    def learn():
        tokens, assignment, _ = tokenizer(features)
        return tokens, assignment, torch.autograd.grad(tokens.square().sum(), features)[0]

    monkeypatch.setattr(clusters, "suits", lambda *tensors: False)
    plain = learn()
    monkeypatch.setattr(clusters, "suits", lambda *tensors: True)
    ours = learn()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
