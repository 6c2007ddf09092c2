"""Tokens that ask pixels or one another, against the library, forward and backward, at odd sizes."""

import pytest
import torch

from saccade.kernels import HAS_TRITON
from saccade.kernels import token_attention as kernels
from saccade.layers import attention, relation
from saccade.layers.relation import TokenTransformer
from saccade.tokens.visual_tokens import RecurrentTokenizer

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is no kernel to compare")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernel runs in Triton's interpreter
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # which NumPy, and so the interpreter, has
PIXELS = [(2, 3, 20, 40, 2), (1, 8, 49, 32, 1), (3, 17, 33, 48, 3)]  # B, M, N, D, heads
TOKENS = [(2, 16, 64, 32, 2), (1, 5, 80, 33, 1), (3, 20, 96, 60, 3)]  # B, M, E, D, heads
LARGE = {"pixels": [(4, 8, 196, 1024, 16)], "tokens": [(4, 16, 1024, 1024, 16)]} if DEVICE == "cuda" else {}


def cases(small, kind):
    all_sizes = small + LARGE.get(kind, [])
    return [(size, torch.float32, 1e-5) for size in small] + [(size, HALF, 1e-2) for size in all_sizes]


def values(*shapes, dtype):
    generator = torch.Generator().manual_seed(sum(shapes[0]))
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_() for shape in shapes]


def error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def same(ours, theirs, inputs, most):
    """There, and back to both inputs."""
    g = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1)).to(ours)
    assert ours.dtype == inputs[0].dtype
    assert error(ours, theirs) < most
    backs = zip(torch.autograd.grad(ours, inputs, g), torch.autograd.grad(theirs, inputs, g.double()), strict=True)
    assert all(error(a, b) < most for a, b in backs)


@pytest.mark.parametrize(("size", "dtype", "most"), cases(PIXELS, "pixels"))
def test_tokens_ask_pixels(size, dtype, most):
    batch, asking, pixels, dim, heads = size
    inputs = values((batch, asking, dim), (batch, pixels, 2 * dim), dtype=dtype)
    theirs = kernels.ask_pixels_twin(*(x.double() for x in inputs), heads, 0.3)
    same(kernels._AskPixels.apply(*inputs, heads, 0.3), theirs, inputs, most)


@pytest.mark.parametrize(("size", "dtype", "most"), cases(TOKENS, "tokens"))
def test_tokens_ask_one_another(size, dtype, most):
    batch, count, both, dim, heads = size
    inputs = values((batch, count, both), (batch, count, dim), dtype=dtype)
    theirs = kernels.ask_each_other_twin(*(x.double() for x in inputs), heads)
    same(kernels._AskEachOther.apply(*inputs, heads), theirs, inputs, most)


def test_a_batch_is_its_pictures():
    query, both = values((3, 4, 32), (3, 30, 64), dtype=torch.float32)
    whole = kernels._ask_pixels(query, both, 2, 0.25)
    for i in range(3):
        assert torch.equal(whole[i : i + 1], kernels._ask_pixels(query[i : i + 1], both[i : i + 1], 2, 0.25))


def test_the_operators_are_sound():
    torch.library.opcheck(kernels._pixels_op, (*values((1, 3, 16), (1, 9, 32), dtype=torch.float32), 1, 0.25))
    torch.library.opcheck(kernels._tokens_op, (*values((1, 5, 32), (1, 5, 16), dtype=torch.float32), 1))


def test_few_means_few():
    assert kernels.is_small(32, 256, 16, 64)
    assert not any((kernels.is_small(33, 9, 16), kernels.is_small(8, 257, 16), kernels.is_small(8, 9, 65, 16)))
    half = torch.empty(2, 3, 4, dtype=torch.bfloat16)
    assert kernels.fit(half, half)
    assert not any((kernels.fit(half.float()), kernels.fit(half, half.half()), kernels.fit(half.transpose(0, 1))))


@pytest.fixture
def anywhere(monkeypatch):
    """Take the kernels for any tensors in one piece."""
    monkeypatch.setattr(attention, "suits", lambda *tensors: True)
    monkeypatch.setattr(kernels, "fit", lambda *tensors: all(tensor.is_contiguous() for tensor in tensors))


def count_calls(monkeypatch, place, name):
    calls, real = [], getattr(place, name)
    monkeypatch.setattr(place, name, lambda *given: calls.append(1) or real(*given))
    return calls


@pytest.mark.parametrize("training", [False, True])
def test_a_transformer_takes_it_and_says_the_same(monkeypatch, anywhere, training):
    torch.manual_seed(0)
    layer = TokenTransformer(64, 2).to(DEVICE).train(training)
    torch.nn.init.ones_(layer.norm.bn.weight)
    vectors = torch.randn(2, 9, 64, device=DEVICE)
    calls = count_calls(monkeypatch, kernels, "ask_each_other")
    ours = layer(vectors)
    assert calls == [1]
    monkeypatch.setattr(relation, "tokens_ask", lambda *_: False)
    assert error(ours, layer(vectors)) < 1e-5
    assert calls == [1]


def test_a_tokenizer_takes_it_and_says_the_same(monkeypatch, anywhere):
    torch.manual_seed(0)
    layer = RecurrentTokenizer(64, 48, num_heads=2).to(DEVICE).train()  # keys and values vector by vector
    features, tokens = torch.randn(2, 64, 6, 5, device=DEVICE), torch.randn(2, 8, 48, device=DEVICE)
    calls = count_calls(monkeypatch, __import__("saccade.tokens.visual_tokens", fromlist=["_"]), "ask_pixels")
    ours = layer(features, tokens)
    assert calls == [1]
    monkeypatch.setattr("saccade.tokens.visual_tokens.tokens_ask", lambda *_: False)
    for a, b in zip(ours, layer(features, tokens), strict=True):
        assert error(a, b) < 1e-5
    assert calls == [1]
