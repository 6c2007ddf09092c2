"""Attention of short lists against the library's, forward and backward."""

import pytest
import torch
from torch.library import opcheck

from saccade.explain.hooks.attention import record_attention
from saccade.kernels import HAS_TRITON, _switch, enabled
from saccade.kernels.short_attention import is_short, plain_attention
from saccade.layers.attention import SelfAttention

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is no kernel to compare")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernel runs in Triton's interpreter
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no bfloat16 products


def values(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize(
    ("count", "dim", "heads"),
    [(49, 32, 8), (9, 48, 6), (64, 64, 1), (1, 16, 1), (17, 96, 3), (36, 16, 2), (36, 48, 2)],
    ids=["49 of 8 x 4", "9 of 6 x 8", "64 of 1 x 64", "1 of 1 x 16", "17 of 3 x 32", "36 of 2 x 8", "36 of 2 x 24"],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (HALF, 1e-2)])
def test_equals_the_library(count, dim, heads, dtype, tolerance):
    from saccade.kernels.short_attention import short_attention

    qkv, g = values(2, count, 3 * dim, dtype=dtype).requires_grad_(), values(2, count, dim, dtype=dtype)
    assert is_short(qkv, heads)
    ours = short_attention(qkv, heads)
    exact = plain_attention(qkv.double(), heads)
    pairs = [(ours, exact)]
    pairs += zip(torch.autograd.grad(ours, qkv, g), torch.autograd.grad(exact, qkv, g.double()), strict=True)
    for a, b in pairs:
        assert (a.double() - b.double()).norm() <= tolerance * b.double().norm()


def test_large_scores_stay_finite():
    from saccade.kernels.short_attention import short_attention

    qkv = (100 * values(1, 5, 48)).requires_grad_()
    (gradient,) = torch.autograd.grad(short_attention(qkv, 2).sum(), qkv)
    torch.testing.assert_close(short_attention(qkv, 2), plain_attention(qkv, 2), rtol=1e-4, atol=1e-4)
    assert gradient.isfinite().all()


def test_what_it_is_not_made_for_is_left_to_the_library():
    assert is_short(torch.zeros(2, 49, 3 * 64), 16)
    assert not is_short(torch.zeros(2, 65, 3 * 64), 16), "long lists"
    assert not is_short(torch.zeros(2, 49, 3 * 48), 4), "heads of 12"
    assert not is_short(torch.zeros(2, 49, 3 * 8), 2), "fewer than 16 channels"
    assert not is_short(torch.zeros(2, 49, 3 * 256), 2), "heads of 128"
    assert not is_short(torch.zeros(49, 2, 3 * 64).transpose(0, 1), 16), "other strides"


def test_the_operator_keeps_its_word():
    from saccade.kernels import short_attention

    checks = ("test_schema",) if DEVICE == "cpu" else ("test_schema", "test_faketensor")
    qkv, g = values(2, 5, 48), values(2, 5, 16)
    opcheck(short_attention._op, (qkv, 2), test_utils=checks)
    opcheck(short_attention._gradient_op, (g, qkv, 2), test_utils=checks)


def test_the_layer_takes_it_and_can_still_be_watched(monkeypatch):
    """The weights that `attentions` shows are those of the library's path, which it must not lose."""
    from saccade.kernels import short_attention
    from saccade.layers import attention

    monkeypatch.setattr(attention, "suits", lambda *_: _switch["on"])  # also where there is no GPU
    layer, tokens = SelfAttention(16, 2).to(DEVICE), values(2, 5, 16)
    calls = []
    kernel = short_attention.short_attention
    monkeypatch.setattr(attention, "short_attention", lambda *args: calls.append(args) or kernel(*args))
    with torch.no_grad():
        ours = layer(tokens)
        assert len(calls) == 1
        with record_attention(layer) as seen:
            watched = layer(tokens)
        assert len(calls) == 1
        assert len(seen) == 1
        with enabled(False):
            monkeypatch.undo()
            plain = layer(tokens)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(watched, plain, rtol=1e-5, atol=1e-5)
