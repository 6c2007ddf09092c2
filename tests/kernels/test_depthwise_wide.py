"""The wide depth-wise convolution by its kernel against the library, forward and backward, at odd sizes."""

import pytest
import torch
from torch import nn
from torch.library import opcheck

from saccade.kernels import HAS_TRITON, depthwise_wide
from saccade.layers import depthwise, kept
from saccade.tokens.clusters import ConvClustering

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is no kernel to compare")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernel runs in Triton's interpreter
SIZES = [(2, 20, 5, 7, 7), (1, 33, 1, 13, 7), (1, 8, 13, 1, 7), (1, 48, 7, 5, 5), (1, 64, 2, 6, 5)]
SIZES += [(8, 96, 56, 56, 7), (4, 192, 28, 28, 7), (3, 320, 14, 14, 7), (1, 130, 61, 33, 5)] if DEVICE == "cuda" else []
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")


def values(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def given(size, dtype=torch.float32):
    """x, weight and bias that learn, and a gradient in another order of memory than x."""
    batch, channels, height, width, side = size
    x = values(batch, channels, height, width, dtype=dtype).contiguous(memory_format=torch.channels_last)
    leaves = x, values(channels, 1, side, side) / side, values(channels)
    return *(leaf.requires_grad_() for leaf in leaves), values(batch, channels, height, width, dtype=dtype)


def error(ours, exact):
    return ((ours.double() - exact).norm() / exact.norm().clamp(min=1e-12)).item()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_equals_its_twin(size, gelu, dtype, tolerance):
    x, weight, bias, g = given(size, dtype)
    ours = depthwise_wide.depthwise_wide(x, weight, bias, gelu)
    assert ours.dtype == dtype
    assert ours.is_contiguous(memory_format=torch.channels_last)
    twin = depthwise_wide.depthwise_wide_twin(x.double(), weight.double(), bias.double(), gelu)
    assert error(ours, twin) < tolerance
    found = torch.autograd.grad(ours, (x, weight, bias), g)
    expected = torch.autograd.grad(twin, (x, weight, bias), g.double())
    for a, b, leaf in zip(found, expected, (x, weight, bias), strict=True):
        assert a.dtype == leaf.dtype
        assert error(a, b) < tolerance


@pytest.mark.parametrize("tall", [1, 2, 3, 5, 11])
def test_runs_of_rows_meet_without_a_seam(tall, monkeypatch):
    x, weight, bias, _ = (value.detach() for value in given((1, 8, 11, 5, 7)))
    monkeypatch.setattr(depthwise_wide, "_convolving", depthwise_wide._convolving.__wrapped__)  # keeps no plans
    whole = depthwise_wide.depthwise_wide_twin(x.double(), weight.double(), bias.double(), True)
    monkeypatch.setattr(depthwise_wide, "TALL", tall)
    monkeypatch.setattr(depthwise_wide, "WARPS", 1)
    assert error(depthwise_wide.depthwise_wide(x, weight, bias, True), whole) < 1e-5


def test_a_batch_is_its_maps():
    x, weight, bias, _ = (value.detach() for value in given((3, 20, 6, 9, 7)))
    whole = depthwise_wide.depthwise_wide(x, weight, bias, True)
    for one, y in zip(x, whole, strict=True):
        assert torch.equal(depthwise_wide.depthwise_wide(one[None], weight, bias, True)[0], y)


def test_nothing_outside_the_map_is_read(monkeypatch):
    """A map between others that are not numbers."""
    x, weight, bias, _ = (value.detach() for value in given((3, 20, 5, 7, 7)))
    whole = depthwise_wide.depthwise_wide(x, weight, bias, True)
    x[0] = x[2] = float("nan")
    assert torch.equal(depthwise_wide.depthwise_wide(x, weight, bias, True)[1], whole[1])


@pytest.mark.parametrize("gelu", [False, True])
def test_operators_keep_their_word(gelu):
    x, weight, bias, g = given(SIZES[0])
    rows = x.detach().permute(0, 2, 3, 1).requires_grad_()
    opcheck(depthwise_wide._op, (rows, weight, bias, gelu), test_utils=CHECKS)
    turned = g.permute(0, 2, 3, 1)  # as a gradient may arrive
    fixed = rows.detach(), weight.detach(), bias.detach()
    opcheck(depthwise_wide._gradients_op, (turned, *fixed, gelu), test_utils=CHECKS)
    found = torch.autograd.grad(depthwise_wide._op(rows, weight, bias, gelu), (rows, weight, bias), turned)
    expected = torch.autograd.grad(depthwise_wide.depthwise_wide(x, weight, bias, gelu), (x, weight, bias), g)
    for a, b in zip(found, (expected[0].permute(0, 2, 3, 1), *expected[1:]), strict=True):
        assert torch.equal(a, b)


def test_poisoned_memory_never_shows(monkeypatch):
    make = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x: make(x).fill_(float("nan")))
    for size in SIZES:
        x, weight, bias, g = (value.detach() for value in given(size))
        taps, sizes = depthwise_wide.as_taps(weight), depthwise_wide._sizes(x, weight)
        g = g.contiguous(memory_format=torch.channels_last)
        found = depthwise_wide._differentiate(sizes, g, x, taps, weight, bias, True)
        assert all(value.isfinite().all() for value in found)
        assert depthwise_wide._convolve(sizes, x, taps, bias, True).isfinite().all()


@pytest.fixture
def taken(monkeypatch):
    """Take the road of a GPU on any device, and count."""
    calls, original = [], depthwise_wide.depthwise_wide
    monkeypatch.setattr(depthwise, "suits", lambda *_: True)
    monkeypatch.setattr(depthwise_wide, "depthwise_wide", lambda *args: calls.append(args[4]) or original(*args))
    return calls


@pytest.mark.parametrize("compiled", [False, True])
def test_a_clustering_scores_and_learns_the_same(taken, compiled, monkeypatch):
    torch.manual_seed(0)
    clustering = ConvClustering(20, 3).to(DEVICE)
    x = values(2, 20, 5, 9).contiguous(memory_format=torch.channels_last).requires_grad_()
    g = values(2, 3, 45)
    leaves = x, *clustering.parameters()

    def learn(run):
        with torch.no_grad():
            answer = run(x)
        scores = run(x)
        return answer, scores, *torch.autograd.grad(scores, leaves, g)

    ours = learn(torch.compile(clustering, backend="aot_eager") if compiled else clustering)
    assert len(taken) == 2
    monkeypatch.setattr(depthwise, "is_wide", lambda _: False)
    for a, b in zip(ours, learn(clustering), strict=True):
        assert error(a, b.double()) < 1e-5
    assert len(taken) == 2


@torch.no_grad()
def test_taps_of_a_constant_are_laid_out_once(taken):
    conv = nn.Conv2d(8, 8, 7, padding=3, groups=8).to(DEVICE).requires_grad_(False)
    x = values(1, 8, 3, 5).contiguous(memory_format=torch.channels_last)
    kept.never_change([conv.weight])
    for _ in range(2):
        depthwise.wide_conv_gelu(conv, x)
    assert taken[0] is taken[1]


def test_other_convolutions_are_called_as_they_are(taken):
    x = values(1, 8, 9, 8).contiguous(memory_format=torch.channels_last)
    others = [
        nn.Conv2d(8, 8, 7, padding=3, groups=8, padding_mode="reflect"),
        nn.Conv2d(8, 8, 7, padding=3, groups=8, bias=False),
        nn.Conv2d(8, 8, 7, padding=2, groups=8),
        nn.Conv2d(8, 8, 7, padding="same", groups=8),
        nn.Conv2d(8, 8, 7, padding=3, groups=8, stride=2),
        nn.Conv2d(8, 8, 7, padding=3, groups=8, dilation=2),
        nn.Conv2d(8, 8, 7, padding=3, groups=4),
        nn.Conv2d(8, 16, 7, padding=3, groups=8),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Conv2d(8, 8, 9, padding=4, groups=8),
        nn.Conv2d(8, 8, (7, 5), padding=(3, 2), groups=8),
    ]
    for conv in others:
        assert not depthwise.fits_wide(conv.to(DEVICE), x)
        assert torch.equal(depthwise.wide_conv_gelu(conv, x), nn.functional.gelu(conv(x)))
    usual = nn.Conv2d(8, 8, 7, padding=3, groups=8)
    assert depthwise.fits_wide(usual, x)
    assert not depthwise.fits_wide(usual, x.contiguous())
    usual.register_forward_hook(lambda *_: None)
    assert not depthwise.fits_wide(usual, x)
    assert taken == []
