"""A stem's first convolution by its kernel against the library, alone and in the stems it stands in."""

import pytest
import torch
from torch import nn
from torch.library import opcheck

import saccade
from saccade.kernels import HAS_TRITON, first_conv
from saccade.kernels.norm_relu import Norm
from saccade.layers import stem

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is no kernel to compare")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernel runs in Triton's interpreter
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no bfloat16 products
SIZES = [(2, 20, 9, 7), (1, 33, 1, 1), (1, 48, 13, 35), (3, 16, 34, 5)]  # batch, channels, height, width
SIZES += [(4, 48, 224, 224), (2, 32, 115, 61)] if DEVICE == "cuda" else []
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")


def values(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def given(size, dtype=torch.float32):
    batch, channels, height, width = size
    images = values(batch, 3, height, width, dtype=dtype).contiguous(memory_format=torch.channels_last)
    return images, values(channels, 3, 3, 3) / 5, values(channels)


def norms(channels):
    """No norm, a shift, a gain and a shift, a whole norm."""
    numbers = [values(channels + i)[i:] for i in range(4)]
    return None, Norm(*numbers[:1]), Norm(*numbers[:2]), Norm(*numbers[:3], numbers[3] ** 2 + 0.1, 1e-3)


def exactly(images, weight, bias, dtype, gelu=False, norm=None):
    """The twin in float64, of what the kernel multiplies."""
    norm = norm and Norm(*(v.double() if torch.is_tensor(v) else v for v in norm))
    images, weight = images.to(dtype).double(), weight.to(dtype).double()
    return first_conv.first_conv_twin(images, weight, bias.double(), torch.float64, gelu, norm)


def error(ours, exact):
    return ((ours.double() - exact).norm() / exact.norm().clamp(min=1e-12)).item()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("given_in", [torch.float32, HALF])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (HALF, 1e-2)])
def test_equals_its_twin(size, given_in, dtype, tolerance):
    images, weight, bias = given(size, given_in)
    with torch.no_grad():
        for norm in norms(size[1]):
            for gelu in (False, True):
                ours = first_conv.first_conv(images, weight, bias, dtype, gelu, norm)
                assert ours.dtype == dtype
                assert ours.is_contiguous(memory_format=torch.channels_last)
                exact = exactly(images, weight, bias, dtype, gelu, norm)
                assert ours.shape == exact.shape
                assert error(ours, exact) < tolerance


def test_order_in_memory_changes_nothing():
    images, weight, bias = given(SIZES[2])
    answer = first_conv.first_conv(images, weight, bias, HALF)
    wide = values(1, 3, 13, 40)[..., 3:38].copy_(images)  # rows with a gap between them
    for pixels in (images.contiguous(), wide, images.flip(1).flip(1)):
        for taps in (weight, weight.contiguous(memory_format=torch.channels_last), weight.mT.contiguous().mT):
            torch.testing.assert_close(first_conv.first_conv(pixels, taps, bias, HALF), answer, rtol=1e-3, atol=1e-3)


def test_a_batch_is_its_pictures():
    images, weight, bias = given(SIZES[0])
    whole = first_conv.first_conv(images, weight, bias, HALF)
    alone = [first_conv.first_conv(image[None], weight, bias, HALF) for image in images]
    assert torch.equal(whole, torch.cat(alone))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (HALF, 1e-2)])
def test_learns_what_its_twin_learns(size, dtype, tolerance):
    images, weight, bias = given(size)
    leaves = weight.requires_grad_(), bias.requires_grad_()
    ours, exact = first_conv.first_conv(images, *leaves, dtype), exactly(images, *leaves, dtype)
    operator = first_conv._op(images, *leaves, dtype, False, None, None).permute(0, 3, 1, 2)
    g = values(*ours.shape, dtype=dtype)  # in another order of memory than the map
    expected = torch.autograd.grad(exact, leaves, g.double())
    assert torch.equal(operator, ours)
    for found in torch.autograd.grad(ours, leaves, g), torch.autograd.grad(operator, leaves, g):
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == torch.float32
            assert error(a, b) < tolerance


def test_operators_keep_their_word():
    images, weight, bias = given(SIZES[0])
    opcheck(first_conv._op, (images, weight, bias, HALF, True, values(20), values(20)), test_utils=CHECKS)
    leaves = weight.requires_grad_(), bias.requires_grad_()
    opcheck(first_conv._op, (images, *leaves, torch.float32, False, None, None), test_utils=CHECKS)
    g = values(2, 20, 5, 4).permute(0, 2, 3, 1)  # as a gradient may arrive
    given_back = images, weight.detach().contiguous(memory_format=torch.channels_last), bias.detach()
    opcheck(first_conv._gradients_op, (g, *given_back), test_utils=CHECKS)


@pytest.fixture
def taken(monkeypatch):
    """Take the road of a GPU on any device, and count."""
    calls, original = [], first_conv.first_conv
    monkeypatch.setattr(stem, "suits", lambda *_: True)
    monkeypatch.setattr(first_conv, "first_conv", lambda *args: calls.append(len(args)) or original(*args))
    return calls


@pytest.mark.parametrize("name", ["svit_nano", "paca_nano"])
def test_a_stem_answers_the_same(taken, name):
    torch.manual_seed(0)
    model = saccade.create_model(name, num_classes=7).eval()
    images = values(2, 3, 40, 33)
    with torch.no_grad():
        exact = model.double().forward_stem(images.cpu().double())
        assert taken == []
        ours = model.to(DEVICE, HALF).forward_stem(images.to(HALF))
    assert taken == [6 if name.startswith("svit") else 4]
    assert error(ours.cpu(), exact) < 1e-2


@pytest.mark.parametrize("name", ["svit_nano", "paca_nano"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_stem_learns_the_same(taken, name, compiled, monkeypatch):
    torch.manual_seed(0)
    model = saccade.create_model(name, num_classes=7).to(DEVICE).train()
    images = values(2, 3, 40, 32)
    weights = list(model.stem.parameters())

    def learn(run):
        with torch.autocast(DEVICE, HALF):
            features = run(images)
        g = torch.randn(features.shape, generator=torch.Generator().manual_seed(1)).to(features)
        return features.detach().double(), *(v.double() for v in torch.autograd.grad(features, weights, g))

    ours = learn(torch.compile(model.stem, backend="aot_eager") if compiled else model.stem)
    assert taken == [4]
    monkeypatch.setattr(stem, "is_first", lambda _: False)
    for a, b in zip(ours, learn(model.stem), strict=True):
        assert (a - b).norm() < 3e-2 * b.norm() + 1e-3


def test_other_convolutions_are_called_as_they_are(taken):
    images = values(1, 3, 9, 8, dtype=HALF)
    others = [
        nn.Conv2d(3, 8, 3, 2, 1, padding_mode="reflect"),
        nn.Conv2d(3, 8, 3, 2, 1, bias=False),
        nn.Conv2d(3, 8, 3, 2, 0),
        nn.Conv2d(3, 8, 3, 1, 1),
        nn.Conv2d(3, 8, 5, 2, 1),
        nn.Conv2d(3, 9, 3, 2, 1, groups=3),
        nn.Conv2d(3, 8, 3, 2, 1, dilation=2),
        nn.Conv2d(3, first_conv.WIDEST + 1, 3, 2, 1),
    ]
    for conv in others:
        assert not stem.starts(conv.to(DEVICE, HALF), images)
    usual = nn.Conv2d(3, 8, 3, 2, 1).to(DEVICE, HALF)
    assert stem.starts(usual, images)
    assert not stem.starts(usual, images.float())  # float32 keeps its digits
    assert not stem.starts(usual.float(), images)  # types that do not fit are not made to
    assert not stem.starts(usual.to(HALF), images.clone().requires_grad_())
    usual.register_forward_hook(lambda *_: None)
    assert not stem.starts(usual, images)
    assert taken == []


def test_a_norm_that_learns_is_left_alone():
    norm = nn.BatchNorm2d(8)
    with torch.no_grad():
        assert not stem.ends_fixed(norm)
        assert stem.ends_fixed(norm.eval())
        assert not stem.ends_fixed(nn.BatchNorm2d(8, track_running_stats=False).eval())
        assert not stem.ends_fixed(nn.BatchNorm2d(8, affine=False).eval())
    assert not stem.ends_fixed(norm)
