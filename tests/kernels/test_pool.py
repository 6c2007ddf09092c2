"""The end of a stem in one pass against the library, and whole stems against themselves unfused."""

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

import saccade
from saccade.kernels import HAS_TRITON
from saccade.kernels import pool as kernels
from saccade.kernels.norm_relu import Norm
from saccade.kernels.pool import PixelNorm, pool, pool_relu, pool_relu_twin, pool_twin
from saccade.layers import residual

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernel runs in Triton's interpreter
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is no kernel to compare")
@pytest.mark.parametrize("shape", [(2, 24, 9, 8), (1, 5, 1, 1), (1, 70, 4, 41)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (HALF, 1e-2)])
@pytest.mark.parametrize("norm", ["norm", "bias"])
@pytest.mark.parametrize("pixels", [None, PixelNorm(1e-5, 0.9)])
def test_equals_its_twin(shape, dtype, tolerance, norm, pixels):
    features = values(*shape).to(dtype).contiguous(memory_format=torch.channels_last)
    channels = shape[1]
    numbers = Norm(values(channels))
    if norm == "norm":  # gains of both signs: pooling and norm may not be swapped
        numbers = Norm(
            values(channels), values(channels + 1)[1:], values(channels + 2)[2:], values(channels) ** 2, 1e-3
        )
    exact = pool_relu_twin(features.double(), Norm(*(v.double() if torch.is_tensor(v) else v for v in numbers)), pixels)
    ours = pool_relu(features, numbers, pixels)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    assert ours.shape == exact.shape
    assert (ours.double() - exact).norm() <= tolerance * exact.norm()


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is no kernel to compare")
@pytest.mark.parametrize("shape", [(2, 24, 9, 8), (1, 5, 1, 1), (1, 70, 4, 41)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("pixels", [None, PixelNorm(1e-3, 0.9)])
def test_learns_what_its_twin_learns(shape, biased, relu, pixels):
    features = values(*shape).contiguous(memory_format=torch.channels_last).requires_grad_()
    leaves = [features, *([values(shape[1]).requires_grad_()] if biased else [])]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    ours, theirs = (
        run(inputs[0], inputs[1] if biased else None, relu, pixels)
        for run, inputs in ((pool, leaves), (pool_twin, exact))
    )
    g = values(*ours.shape)
    found, expected = torch.autograd.grad(ours, leaves, g), torch.autograd.grad(theirs, exact, g.double())
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    for a, b in zip((ours.detach(), *found), (theirs.detach(), *expected), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4 * float(b.abs().max()) + 1e-6)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is no kernel to compare")
@pytest.mark.parametrize(
    "run", [lambda x: pool(x), lambda x: pool(x, None, True), lambda x: pool_relu(x, Norm(x[0, :, 0, 0]))]
)
def test_a_value_that_is_not_finite_shows(run):
    features = torch.zeros(1, 3, 6, 6, device=DEVICE).contiguous(memory_format=torch.channels_last)
    features[0, 1, 2, 2] = float("nan")
    found = run(features)
    assert found.isnan().nonzero().tolist() == F.max_pool2d(features, 3, 2, 1).isnan().nonzero().tolist() != []


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is no kernel to compare")
def test_the_first_of_equals_gets_the_gradient():
    features = torch.ones(1, 3, 4, 4, device=DEVICE).contiguous(memory_format=torch.channels_last).requires_grad_()
    exact = features.detach().clone().requires_grad_()
    pool(features).sum().backward()
    pool_twin(exact).sum().backward()
    torch.testing.assert_close(features.grad, exact.grad)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is no operator")
@pytest.mark.parametrize("size", [(2, 9, 8, 20), (1, 1, 1, 5), (3, 5, 13, 33)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("relu", "pixels"), [(False, None), (True, None), (True, PixelNorm(1e-3, 0.9))])
def test_compilers_get_the_same(size, biased, relu, pixels):
    batch, height, width, channels = size
    turned = values(batch, channels, height, width).permute(0, 2, 3, 1)  # as a map may arrive
    for x in (values(*size), turned):
        numbers = relu, *(pixels or (None, None))
        leaves = [x.detach().requires_grad_(), *([values(channels).requires_grad_()] if biased else [])]
        bias = leaves[1] if biased else None
        ours = kernels._op(leaves[0], bias, *numbers)[0]
        features = leaves[0].permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
        theirs = pool(features, bias, relu, pixels).permute(0, 2, 3, 1)
        g = values(batch, channels, *ours.shape[1:3]).permute(0, 2, 3, 1)
        pairs = zip(*(torch.autograd.grad(y, leaves, g) for y in (ours, theirs)), strict=True)
        for a, b in ((ours, theirs), *pairs):
            torch.testing.assert_close(a, b)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is no operator")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("relu", "pixels"), [(False, None), (True, PixelNorm(1e-3, 0.9))])
def test_the_operators_keep_their_word(biased, relu, pixels):
    numbers = relu, *(pixels or (None, None))
    for x in (values(2, 5, 7, 20), values(2, 20, 5, 7).permute(0, 2, 3, 1)):
        bias = values(20).requires_grad_() if biased else None
        opcheck(kernels._op, (x.detach().requires_grad_(), bias, *numbers), test_utils=CHECKS)
        pooled, where, scales = kernels._op(x, bias, *numbers)
        given = (pooled.detach(), where, scales) if pixels else (None, where, None)
        for g in (values(2, 3, 4, 20), values(2, 20, 3, 4).permute(0, 2, 3, 1)):
            opcheck(kernels._gradients_op, (g, *given, 5, 7, biased, *numbers), test_utils=CHECKS)


@torch.no_grad()
@pytest.mark.parametrize("name", ["sparseformer_nano", "vt_resnet18"])
@pytest.mark.parametrize("folded", [False, True])
def test_a_stem_answers_the_same(monkeypatch, name, folded):
    model = saccade.create_model(name, num_classes=7).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            torch.nn.init.normal_(module.weight)
    model = saccade.optimize(model) if folded else model
    images = torch.randn(2, 3, 40, 33, generator=torch.Generator().manual_seed(0))
    stem = model.stem if name.startswith("sparse") else model.forward_stem
    images = images.contiguous(memory_format=torch.channels_last)
    expected = stem(images)
    taken = []
    twin = residual.pooling.pool_relu_twin
    monkeypatch.setattr(residual.pooling, "pool_relu_twin", lambda *args: taken.append(1) or twin(*args))
    monkeypatch.setattr(residual, "suits", lambda *_: True)  # on a CPU, what a GPU would do, with the kernel's twin
    torch.testing.assert_close(stem(images), expected, rtol=1e-4, atol=1e-5)
    assert taken == [1]


@pytest.mark.parametrize("name", ["sparseformer_nano", "vt_resnet18"])
def test_a_stem_learns_the_same(monkeypatch, name):
    model = saccade.create_model(name, num_classes=7).train()
    images = torch.randn(2, 3, 40, 33, generator=torch.Generator().manual_seed(0))
    images = images.contiguous(memory_format=torch.channels_last)
    stem = model.stem if name.startswith("sparse") else model.forward_stem
    layers = [model.stem.conv] if name.startswith("sparse") else [model.conv1, model.bn1]
    weights = [weight for layer in layers for weight in layer.parameters()]

    def learn():
        features = stem(images)
        return features.detach(), *torch.autograd.grad(features.square().sum(), weights)

    expected = learn()
    taken = []
    twin = residual.pooling.pool_twin
    monkeypatch.setattr(residual.pooling, "pool_twin", lambda *args: taken.append(1) or twin(*args))
    monkeypatch.setattr(residual, "suits", lambda *_: True)  # on a CPU, what a GPU would do, with the kernel's twin
    for a, b in zip(learn(), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))
    assert len(taken) == name.startswith("sparse")
