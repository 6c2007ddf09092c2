"""Stems that end in max pooling against their references, and which implementation is chosen."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import opcheck

from saccade.ops import pooling
from saccade.ops._dispatch import plain_layer
from saccade.ops._launch import record_specializations
from saccade.ops.conv import FixedNorm
from tests.ops.compare import DEVICE, HALF, check, kernels_allowed, needs_triton, randn, relative_error
from tests.ops.layers import conv_of, eval_norm, with_tensors
from tests.ops.test_conv import Block, operators

pytestmark = needs_triton
SHAPES = [(2, 24, 9, 8), (1, 5, 1, 1), (1, 70, 4, 41)]


def channels_last(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return randn(*shape, dtype=dtype).contiguous(memory_format=torch.channels_last)


@plain_layer
class PixelNorm(nn.Module):
    """What `conv_pool_relu` knows by `pixel_norm_constants`."""

    def pixel_norm_constants(self, channels: int) -> tuple[float, float]:
        return 1e-3, 0.9

    def forward(self, features: Tensor) -> Tensor:
        return normalized(features, 1e-3, 0.9)


def normalized(features: Tensor, eps: float | None, scale: float) -> Tensor:
    if eps is None:
        return features
    return F.layer_norm(features.permute(0, 2, 3, 1), features.shape[1:2], eps=eps).permute(0, 3, 1, 2) * scale


class MaxPool:
    """The pooling kernels as a function of features and, with a norm of the pixels, of the bias before its ReLU."""

    def __init__(self, eps: float | None, scale: float = 1.0):
        self.settings = eps, scale

    def implementation(self, *inputs):
        return "triton"

    def __call__(self, features, bias=None):
        return pooling._max_pool(features, bias, *self.settings)[0]

    def reference(self, features, bias=None):
        pooled = F.max_pool2d(features, 3, stride=2, padding=1)
        return pooled if bias is None else normalized(F.relu(pooled + bias.view(-1, 1, 1)), *self.settings)


@pytest.mark.parametrize("shape", SHAPES)
def test_max_pool_matches_reference(shape):
    check(MaxPool(None), channels_last(*shape), tolerance=1e-4)
    check(MaxPool(1e-3, 0.9), channels_last(*shape), randn(shape[1]), tolerance=1e-4)


def test_max_pool_matches_reference_in_half_precision():
    check(MaxPool(None), channels_last(2, 24, 9, 8, dtype=HALF), tolerance=1e-2)
    check(MaxPool(1e-3, 0.9), channels_last(2, 24, 9, 8, dtype=HALF), randn(24), tolerance=1e-2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_inference_kernel_matches_reference(shape, eps):
    features, norm = channels_last(*shape), eval_norm(shape[1]).to(DEVICE)
    fixed = FixedNorm(norm.bias, norm.weight, norm.running_mean, norm.running_var, norm.eps)
    with torch.no_grad():
        pooled = pooling._run_pool(features, fixed, True, eps, 0.9, False)[0]
        expected = F.relu(F.max_pool2d(norm.double()(features.double()), 3, stride=2, padding=1))
    assert pooled.is_contiguous(memory_format=torch.channels_last)
    assert relative_error(pooled, normalized(expected, eps, 0.9)) < 1e-5


def test_max_pool_propagates_nan():
    features = torch.zeros(1, 3, 6, 6, device=DEVICE).contiguous(memory_format=torch.channels_last)
    features[0, 1, 2, 2] = float("nan")
    expected = F.max_pool2d(features, 3, 2, 1).isnan()
    assert expected.any()
    assert torch.equal(MaxPool(None)(features).isnan(), expected)
    inference = pooling._run_pool(features, FixedNorm(torch.zeros(3, device=DEVICE)), True, None, 1.0, False)[0]
    assert torch.equal(inference.isnan(), expected)


def test_max_pool_gives_the_gradient_to_the_first_of_equals():
    check(MaxPool(None), torch.ones(1, 3, 4, 4, device=DEVICE).contiguous(memory_format=torch.channels_last))


def test_max_pool_operators_are_consistent():
    features = channels_last(2, 20, 5, 7).requires_grad_()
    opcheck(pooling._max_pool.operator, (features, None, None, 1.0))
    opcheck(pooling._max_pool.operator, (features, randn(20).requires_grad_(), 1e-3, 0.9))


def test_max_pool_uses_reference_where_the_kernel_does_not_apply():
    features, usual = channels_last(2, 8, 6, 6), nn.MaxPool2d(3, 2, 1)
    implementation = pooling.max_pool.implementation
    with kernels_allowed():
        assert implementation(features, usual) == "triton"
        for pool in (nn.MaxPool2d(2, 2), nn.MaxPool2d(3, 2, 1, ceil_mode=True), nn.AvgPool2d(3, 2, 1), nn.Identity()):
            assert implementation(features, pool) == "reference"
        assert implementation(features.contiguous(), usual) == "reference"
        assert implementation(channels_last(1, 513, 2, 2), usual) == "reference"
        with torch.no_grad():
            assert implementation(features, usual) == "reference"
        usual.register_forward_hook(lambda *_: None)
        assert implementation(features, usual) == "reference"


class Stem:
    """A stem as a function of tensors; the images get no gradient."""

    def __init__(self, op, resnet: bool):
        self.op, self.resnet = op, resnet

    def arguments(self, images, weight, bias):
        layer, channels = conv_of(weight, bias, stride=2, padding=3), weight.shape[0]
        if not self.resnet:
            return images.detach(), layer, PixelNorm()
        norm = with_tensors(nn.BatchNorm2d(channels).to(weight.device), weight=bias.cos(), bias=bias.sin())
        if weight.dtype == torch.float64:
            norm.double()
        return images.detach(), with_tensors(layer, bias=None), norm, nn.MaxPool2d(3, 2, 1)

    def implementation(self, *inputs):
        return self.op.implementation(*self.arguments(*inputs))

    def __call__(self, *inputs):
        return self.op(*self.arguments(*inputs))

    def reference(self, *inputs):
        return self.op.reference(*self.arguments(*inputs))


STEMS = {"conv_pool_relu": "triton", "conv_norm_relu_pool": "composed"}


@pytest.mark.parametrize("name", STEMS)
@pytest.mark.parametrize("size", [(2, 20, 13), (1, 7, 30)])
def test_stem_matches_reference_in_training(name, size):
    batch, height, width = size
    stem = Stem(getattr(pooling, name), name == "conv_norm_relu_pool")
    inputs = channels_last(batch, 3, height, width), randn(20, 3, 7, 7) / 10, randn(20)
    check(stem, *inputs, implementation=STEMS[name], tolerance=1e-4)


@pytest.mark.parametrize("name", STEMS)
@pytest.mark.parametrize("out", [20, 64])
def test_stem_over_blocks_matches_reference_in_training(name, out):
    """In half precision. Few digits: both convolutions are exact, so that pooling finds the same maxima.

    After a norm, values that bfloat16 rounds to one have the gradient of another maximum.
    """
    stem = Stem(getattr(pooling, name), name == "conv_norm_relu_pool")
    images = torch.randint(-4, 5, (2, 3, 20, 13), generator=torch.Generator().manual_seed(0)).to(DEVICE, HALF)
    weight = torch.randint(-8, 9, (out, 3, 7, 7), generator=torch.Generator().manual_seed(1)).to(DEVICE, HALF) / 64
    images = images.contiguous(memory_format=torch.channels_last)
    tolerance = 5e-2 if torch.bfloat16 == HALF and name == "conv_norm_relu_pool" else 1e-2
    check(stem, images, weight, randn(out), implementation=STEMS[name], tolerance=tolerance)


@torch.no_grad()
@pytest.mark.parametrize("name", STEMS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_stem_matches_reference_in_inference(name, dtype):
    torch.manual_seed(0)
    op, layer = getattr(pooling, name), nn.Conv2d(3, 20, 7, 2, 3).to(DEVICE, dtype)
    layers = (PixelNorm(),) if name == "conv_pool_relu" else (eval_norm(20).to(DEVICE), nn.MaxPool2d(3, 2, 1))
    images = channels_last(2, 3, 20, 13, dtype=dtype)
    with kernels_allowed():
        assert op.implementation(images, layer, *layers) == "triton"
        features = op(images, layer, *layers)
    expected = op.reference(images.double(), *(copy.deepcopy(module).double() for module in (layer, *layers)))
    assert features.dtype == dtype
    assert relative_error(features, expected) < (1e-5 if dtype == torch.float32 else 1e-2)


@torch.no_grad()
def test_compiled_inference_of_conv_pool_relu_convolves_blocks():
    layer, images = nn.Conv2d(3, 20, 7, 2, 3).to(DEVICE, HALF), channels_last(2, 3, 20, 13, dtype=HALF)
    with kernels_allowed():
        features, names = operators(Block(pooling.conv_pool_relu, layer, PixelNorm()), images)
    assert names == ["to_blocks"]
    assert relative_error(features, pooling.conv_pool_relu.reference(images, layer, PixelNorm())) < 1e-2


@pytest.mark.parametrize(
    ("name", "out", "expected"),
    [
        ("conv_pool_relu", 20, ["stem_conv", "max_pool"]),
        ("conv_pool_relu", 64, ["to_blocks", "max_pool"]),
        ("conv_norm_relu_pool", 64, ["to_blocks", "max_pool"]),
    ],
)
def test_compiled_training_of_stems_uses_their_operators(name, out, expected):
    layer, images = nn.Conv2d(3, out, 7, 2, 3).to(DEVICE, HALF), channels_last(2, 3, 20, 13, dtype=HALF)
    layers = (PixelNorm(),) if name == "conv_pool_relu" else (nn.BatchNorm2d(out).to(DEVICE), nn.MaxPool2d(3, 2, 1))
    with kernels_allowed():
        features, names = operators(Block(getattr(pooling, name), layer, *layers), images)
        assert names == expected
        features.float().square().sum().backward()
    assert layer.weight.grad.abs().sum() > 0


def test_conv_pool_relu_calls_norms_it_does_not_know():
    images, layer = channels_last(2, 3, 20, 13), nn.Conv2d(3, 8, 7, 2, 3).to(DEVICE)
    hooked = PixelNorm()
    hooked.register_forward_hook(lambda *_: None)
    with kernels_allowed():
        assert pooling.conv_pool_relu.implementation(images, layer, PixelNorm()) == "triton"
        assert pooling.conv_pool_relu.implementation(images, layer, hooked) == "reference"
        assert pooling.conv_pool_relu.implementation(images, layer, nn.Identity()) == "reference"
        half = copy.deepcopy(layer).to(HALF)
        assert pooling.conv_pool_relu.implementation(images.to(HALF), half, nn.Identity()) == "blocks"


def test_pooling_compiles_the_same_kernels_for_all_sizes():
    layer, pool = nn.Conv2d(3, 64, 7, 2, 3).to(DEVICE), nn.MaxPool2d(3, 2, 1)
    with kernels_allowed(), record_specializations(execute=False) as compiled:
        for size in range(3, 40):
            features = torch.empty(size % 3 + 1, 64, size, 50 - size, memory_format=torch.channels_last, device=DEVICE)
            pooling.max_pool(features.requires_grad_(), pool).sum().backward()
            images = torch.zeros(size % 3 + 1, 3, size, 50 - size, device=DEVICE)
            with torch.no_grad():
                pooling.conv_pool_relu(images, layer, PixelNorm())
    assert len(compiled) == 3  # pooling in training and in inference, gradient
