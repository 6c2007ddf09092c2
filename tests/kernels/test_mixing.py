"""Sampling and mixing where they learn: the kernels against their twin, forward and backward, at odd sizes."""

import pytest
import torch
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from saccade.kernels import HAS_TRITON, mixing
from saccade.tokens import regions
from saccade.tokens.regions import AdaptiveDecoder, learns_at_once, sample_and_mix

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is no kernel to compare")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernel runs in Triton's interpreter
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no bfloat16 products
# batch, channels, height, width, tokens, points
SIZES = [(2, 20, 5, 7, 3, 9), (1, 33, 1, 6, 2, 4), (1, 16, 13, 1, 2, 5), (1, 96, 7, 5, 2, 36), (1, 48, 5, 5, 1, 49)]
SIZES += [(4, 96, 56, 56, 49, 36), (2, 128, 33, 61, 10, 64)] if DEVICE == "cuda" else []
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")


def values(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def given(size, dtype=torch.float32):
    """features (B, C, H, W), points (B, M, P, 2), made (B, M, C C + P P), biases (C), (P)."""
    batch, channels, height, width, tokens, points = size
    features = values(batch, channels, height, width, dtype=dtype).contiguous(memory_format=torch.channels_last)
    places = values(batch, tokens, points, 2) * 0.6 + 0.5  # some outside
    places[0, 0, 0] = torch.tensor([40.0, -3.0])  # one far outside
    made = torch.cat([values(batch, tokens, n * n) * n**-0.5 for n in (channels, points)], dim=2).to(dtype)
    return [value.requires_grad_() for value in (features, places, made, values(channels), values(points))]


def twin(features, places, made, *biases):
    channels, points = (bias.numel() for bias in biases)
    matrices = made.split((channels**2, points**2), dim=2)
    matrices = [matrix.unflatten(2, (n, n)) for matrix, n in zip(matrices, (channels, points), strict=True)]
    return sample_and_mix(features, places, *matrices, *biases)


def error(ours, exact):
    return ((ours.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-12)).item()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (HALF, 1e-2)])
def test_equals_its_twin(size, dtype, tolerance):
    inputs = given(size, dtype)
    exact = [value.detach().double().requires_grad_() for value in inputs]
    ours, expected = mixing.look(*inputs), twin(*exact)
    assert ours.dtype == dtype
    assert error(ours, expected) < tolerance
    g = values(*ours.shape, dtype=dtype)
    found = torch.autograd.grad(ours, inputs, g)
    for value, a, b in zip(inputs, found, torch.autograd.grad(expected, exact, g.double()), strict=True):
        assert a.dtype == value.dtype
        assert a.shape == value.shape
        assert error(a, b) < tolerance


def test_a_batch_is_its_images_one_by_one():
    inputs = given((3, 20, 5, 7, 2, 9))
    ours = mixing.look(*inputs)
    found = torch.autograd.grad(ours.square().sum(), inputs)
    singles = [mixing.look(*(value[i : i + 1] for value in inputs[:3]), *inputs[3:]) for i in range(3)]
    alone = torch.autograd.grad(torch.cat(singles).square().sum(), inputs)
    torch.testing.assert_close(ours, torch.cat(singles))
    torch.testing.assert_close(found, alone)


def test_gaps_between_rows_and_gradients_in_any_order_do_not_matter():
    inputs = [value.detach() for value in given((2, 20, 5, 7, 3, 9))]
    inputs[0] = inputs[0].permute(0, 2, 3, 1)
    made = inputs[2]
    wide = made.new_full((2, 3, made.shape[2] + 7), float("nan"))
    wide[..., : made.shape[2]] = made
    gaps, turned = wide[..., : made.shape[2]], made.transpose(0, 1).contiguous().transpose(0, 1)
    expected = mixing._op(*inputs)
    g = values(*expected.shape)
    gradients = mixing._gradients_op(g, *inputs)
    for other in (gaps, turned):
        inputs[2] = other
        assert torch.equal(mixing._op(*inputs), expected)
        found = mixing._gradients_op(g.transpose(2, 3).contiguous().transpose(2, 3), *inputs)
        assert found[2].is_contiguous()
        torch.testing.assert_close(found, gradients)


def test_operators_keep_their_word():
    inputs = given((2, 8, 5, 6, 3, 4))
    with torch.no_grad():
        x = inputs[0].permute(0, 2, 3, 1)
    inputs = [x.requires_grad_(), *inputs[1:]]
    opcheck(mixing._op, inputs, test_utils=CHECKS)
    g = values(2, 3, 8, 4).transpose(2, 3)  # as a gradient may arrive
    opcheck(mixing._gradients_op, (g, *(value.detach() for value in inputs)), test_utils=CHECKS)


def learn(decoder, inputs, run):
    """Answer, and gradients of what was given and of every parameter."""
    inputs = [value.detach().requires_grad_() for value in inputs]
    y = run(decoder, *inputs)
    wanted = [*inputs, *decoder.parameters()]
    return y.detach(), *torch.autograd.grad(y.float().square().sum(), wanted)


def test_the_decoder_learns_the_same_also_checkpointed_and_compiled(monkeypatch):
    torch.manual_seed(0)
    decoder = AdaptiveDecoder(16, 12, 9).to(DEVICE)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    inputs = values(2, 3, 16), values(2, 12, 5, 7).contiguous(memory_format=torch.channels_last), values(2, 3, 9, 2)
    monkeypatch.setattr(regions, "suits", lambda *_: False)
    expected = learn(decoder, inputs, lambda decoder, *given: decoder(*given))
    monkeypatch.setattr(regions, "suits", lambda *_: True)
    called = []
    monkeypatch.setattr(mixing, "_look", lambda *a, run=mixing._look: called.append(1) or run(*a))
    ways = [
        lambda decoder, *given: decoder(*given),
        lambda decoder, *given: checkpoint(decoder, *given, use_reentrant=False),
        lambda decoder, *given: torch.compile(decoder, backend="aot_eager", fullgraph=True)(*given),
    ]
    for run in ways:
        torch.testing.assert_close(learn(decoder, inputs, run), expected, rtol=1e-4, atol=1e-4)
    assert len(called) >= 3  # once, and twice where what is kept is made again


@pytest.mark.parametrize("compiled", [False, True])
def test_under_autocast_gradients_have_the_type_of_what_they_belong_to(compiled, monkeypatch):
    decoder = AdaptiveDecoder(16, 12, 9).to(DEVICE)
    inputs = values(2, 3, 16), values(2, 12, 5, 7, dtype=HALF), values(2, 3, 9, 2)
    monkeypatch.setattr(regions, "suits", lambda *_: True)
    run = torch.compile(decoder, backend="aot_eager", fullgraph=True) if compiled else decoder
    with torch.autocast(DEVICE, HALF):
        y, *found = learn(decoder, inputs, lambda _, *given: run(*given))
    assert y.dtype == HALF
    for value, gradient in zip([*inputs, *decoder.parameters()], found, strict=True):
        assert gradient.dtype == value.dtype
        assert gradient.isfinite().all()


def test_taken_where_it_fits_and_runs_need_not_repeat_exactly(monkeypatch):
    features, places, made, *_ = given((1, 8, 5, 5, 2, 4))
    assert learns_at_once(features, places, made) == (DEVICE == "cuda")
    monkeypatch.setattr(regions, "suits", lambda *_: True)
    assert learns_at_once(features, places, made)
    assert not learns_at_once(features, places.double(), made)
    assert not learns_at_once(features, values(1, 2, 65, 2), made)
    assert not learns_at_once(values(1, 129, 5, 5), places, made)
    assert not learns_at_once(features, values(1, 2, 4, 3), made)
    with torch.no_grad():
        assert not learns_at_once(features, places, made)
    torch.use_deterministic_algorithms(True)
    try:
        assert not learns_at_once(features, places, made)
    finally:
        torch.use_deterministic_algorithms(False)
