"""Attention to a few keys against its twin, forward and backward, at odd sizes."""

import pytest
import torch

from saccade.kernels import HAS_TRITON, few_keys
from saccade.kernels.launch import forget_plans
from saccade.layers.attention import CrossAttention

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is no kernel to compare")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernel runs in Triton's interpreter
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # which NumPy, and so the interpreter, has
SIZES = [(2, 70, 100, 48, 2), (1, 5, 7, 33, 1), (3, 130, 16, 40, 1)]
LARGE = [(4, 3136, 100, 96, 2), (3, 196, 100, 320, 8), (2, 49, 128, 128, 2)] if DEVICE == "cuda" else []
CASES = [(size, torch.float32, 1e-5) for size in SIZES] + [(size, HALF, 1e-2) for size in SIZES + LARGE]


def inputs(batch, queries, keys, dim, heads, dtype):
    generator = torch.Generator().manual_seed(queries + dim)
    query, g = (torch.randn(batch, queries, dim, generator=generator).to(DEVICE, dtype) for _ in range(2))
    key_value = torch.randn(batch, keys, 2 * dim, generator=generator).to(DEVICE, dtype)
    return query.requires_grad_(), key_value.requires_grad_(), g


def error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize(("size", "dtype", "most"), CASES)
def test_equals_its_twin_there_and_back(size, dtype, most):
    heads = size[4]
    query, key_value, g = inputs(*size, dtype)
    ours = few_keys._FewKeys.apply(query, key_value, heads, 0.2)
    twin = few_keys.few_keys_twin(query.double(), key_value.double(), heads, 0.2)
    assert ours.dtype == dtype
    assert error(ours, twin) < most
    for a, b in zip(
        torch.autograd.grad(ours, [query, key_value], g),
        torch.autograd.grad(twin, [query, key_value], g.double()),
        strict=True,
    ):
        assert a.dtype == dtype
        assert error(a, b) < most


def test_shared_queries_add_up(monkeypatch):
    """Many programs to a head, or one: the same gradients of its keys and values."""
    query, key_value, g = inputs(1, 150, 20, 32, 2, torch.float32)
    found = []
    for programs in ((1, 1), (528, 528)):
        monkeypatch.setattr(few_keys, "PROGRAMS", programs)
        forget_plans()
        found.append(few_keys._ask_gradients(g, query.detach(), key_value.detach(), 2, 0.25))
    forget_plans()
    for a, b in zip(*found, strict=True):
        assert error(a, b) < 1e-6


def test_a_batch_is_its_pictures():
    query, key_value, _ = inputs(3, 20, 10, 32, 2, torch.float32)
    whole = few_keys._ask(query.detach(), key_value.detach(), 2, 0.25)
    for i in range(3):
        one = few_keys._ask(query.detach()[i : i + 1], key_value.detach()[i : i + 1], 2, 0.25)
        assert torch.equal(whole[i : i + 1], one)


def test_the_operator_is_sound():
    query, key_value, _ = inputs(1, 9, 5, 16, 1, torch.float32)
    torch.library.opcheck(few_keys._op, (query, key_value, 1, 0.25))


def test_few_means_few():
    def few(keys=100, width=48, dtype=torch.bfloat16, heads=2):
        return few_keys.are_few(
            torch.empty(1, 5, heads * width, dtype=dtype), torch.empty(1, keys, 2 * heads * width, dtype=dtype), heads
        )

    assert all((few(), few(keys=128), few(width=64)))
    assert not any((few(keys=129), few(width=65), few(width=8), few(dtype=torch.float32)))


def test_the_layer_takes_it_and_says_the_same(monkeypatch):
    """Every pixel asks the tokens: by the kernel, where that stands in for the library's, as without it."""
    torch.manual_seed(0)
    layer = CrossAttention(32, 2).to(DEVICE)
    pixels, tokens = torch.randn(2, 30, 32, device=DEVICE), torch.randn(2, 9, 32, device=DEVICE)
    plain = layer(pixels, tokens)
    asked = []
    real = few_keys.few_keys
    monkeypatch.setattr("saccade.layers.attention.suits", lambda *tensors: True)
    monkeypatch.setattr("saccade.layers.attention.are_few", lambda *sizes: True)
    monkeypatch.setattr("saccade.layers.attention.few_keys", lambda *given: asked.append(1) or real(*given))
    assert error(layer(pixels, tokens), plain) < 1e-5
    assert asked
