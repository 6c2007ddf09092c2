"""Depth-wise convolution kernels against their references, and which implementation is chosen."""

import pytest
import torch
from torch import Tensor, nn
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from saccade import ops
from saccade.ops import depthwise
from saccade.ops._launch import record_specializations
from tests.ops.compare import DEVICE, HALF, check, kernels_allowed, needs_triton, outputs_and_gradients, randn

SIZES = [(2, 16, 9, 7), (1, 40, 3, 30), (1, 8, 20, 3), (1, 130, 1, 1)]
WIDE_SIZES = [(2, 20, 5, 7, 7), (1, 33, 1, 13, 7), (1, 8, 13, 1, 7), (1, 48, 7, 5, 5), (1, 64, 2, 6, 5)]
if DEVICE == "cuda":
    SIZES += [(3, 256, 56, 56), (2, 130, 33, 61)]
    WIDE_SIZES += [(8, 96, 56, 56, 7), (4, 192, 28, 28, 7), (3, 320, 14, 14, 7), (1, 130, 61, 33, 5)]


def features_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return randn(*shape, dtype=dtype).contiguous(memory_format=torch.channels_last)


def inputs_of(batch, channels, height, width, dtype=torch.float32, side=3):
    features = features_of(batch, channels, height, width, dtype=dtype)
    return features, randn(channels, 1, side, side, seed=1) / side, randn(channels, seed=2)


@needs_triton
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("act", depthwise.ACTS)
@pytest.mark.parametrize("shortcut", [True, False])
def test_depthwise_conv_matches_reference(size, act, shortcut):
    check(depthwise.depthwise_conv, *inputs_of(*size), act, shortcut)


@needs_triton
@pytest.mark.parametrize("act", depthwise.ACTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_depthwise_conv_matches_reference_in_half_precision(act, dtype):
    check(depthwise.depthwise_conv, *inputs_of(*SIZES[0], dtype=dtype), act, True)


@needs_triton
@pytest.mark.parametrize("act", depthwise.ACTS)
def test_depthwise_steps_equal_the_operation(act):
    """The functions that `ops.mlp` calls on rows (B H W, C)."""
    features, weight, bias = inputs_of(2, 12, 5, 6)
    sizes, rows = (2, 5, 6, 12), features.permute(0, 2, 3, 1).reshape(60, 12)
    g = features_of(2, 12, 5, 6).mul(2)
    with kernels_allowed():
        y = depthwise.depthwise_forward(sizes, rows, weight, bias, depthwise.ACTS[act], True)
        assert torch.equal(y, depthwise.depthwise_conv(features, weight, bias, act).permute(0, 2, 3, 1).flatten(0, 2))
        leaves = [value.requires_grad_() for value in (features, weight, bias)]
        expected = torch.autograd.grad(depthwise.depthwise_conv(*leaves, act), leaves, g)
        rows, g = rows.detach(), g.permute(0, 2, 3, 1).reshape(60, 12)
        gradients = depthwise.depthwise_gradients(sizes, g, rows, weight, bias, depthwise.ACTS[act], True)
    assert torch.equal(gradients[0], expected[0].permute(0, 2, 3, 1).flatten(0, 2))
    assert torch.equal(gradients[1], expected[1])
    assert torch.equal(gradients[2], expected[2])


@needs_triton
def test_depthwise_convs_of_an_empty_batch_are_empty():
    with kernels_allowed():
        assert depthwise.depthwise_conv(*inputs_of(0, 8, 5, 5)).shape == (0, 8, 5, 5)
        conv = nn.Conv2d(8, 8, 7, padding=3, groups=8).to(DEVICE)
        assert depthwise.depthwise_gelu(features_of(0, 8, 5, 5), conv).shape == (0, 8, 5, 5)


@needs_triton
def test_depthwise_conv_uses_reference_where_the_kernel_does_not_apply():
    features, weight, bias = inputs_of(2, 8, 5, 5)
    with kernels_allowed():
        assert depthwise.depthwise_conv.implementation(features, weight, bias) == "triton"
        assert depthwise.depthwise_conv.implementation(features, weight, None) == "reference"
        assert depthwise.depthwise_conv.implementation(features.contiguous(), weight, bias) == "reference"
        assert depthwise.depthwise_conv.implementation(features.double(), weight, bias) == "reference"
        with ops.disabled("depthwise_conv"):
            assert depthwise.depthwise_conv.implementation(features, weight, bias) == "reference"


@needs_triton
def test_depthwise_conv_compiles_the_same_kernels_for_all_sizes_and_wide_layers():
    with kernels_allowed(), record_specializations(execute=False) as compiled:
        for size in range(1, 90):
            channels = (128, 256, 512, 1280, 2048)[size % 5]
            features, weight, bias = inputs_of(size % 3, channels, size % 40 + 1, size)
            depthwise.depthwise_conv(features.requires_grad_(), weight, bias, "pre").sum().backward()
    # Output, gradient of the features, gradient of the weight, its sum (of few rows, and of many).
    assert len(compiled) == 5


@pytest.mark.slow
@needs_triton
def test_depthwise_operators_are_consistent():
    features, weight, bias = (value.requires_grad_() for value in inputs_of(2, 8, 4, 5))
    opcheck(depthwise._depthwise_conv.operator, (features, weight, bias, 2, True))
    opcheck(depthwise._depthwise_gelu.operator, (features, randn(8, 1, 5, 5).requires_grad_(), bias))


# oneDNN, for inference on CPUs.

needs_onednn = pytest.mark.skipif(not depthwise.HAS_ONEDNN, reason="this build of PyTorch has no oneDNN")


def cpu_inputs(*shape: int) -> list[Tensor]:
    return [value.cpu() for value in inputs_of(*shape)]


@needs_onednn
@torch.no_grad()
@pytest.mark.parametrize("act", ["", "post"])
@pytest.mark.parametrize("shortcut", [True, False])
@pytest.mark.parametrize("shape", [(3, 12, 9, 7), (1, 8, 1, 1)])
def test_onednn_matches_reference(act, shortcut, shape):
    features, weight, bias = cpu_inputs(*shape)
    before = weight.clone()
    assert depthwise.depthwise_conv.implementation(features, weight, bias, act, shortcut) == "onednn"
    for shift in (bias, None):
        y = depthwise.depthwise_conv(features, weight, shift, act, shortcut)
        expected = depthwise.depthwise_conv.reference(features, weight, shift, act, shortcut)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(weight, before)


@needs_onednn
def test_onednn_is_for_plain_float32_inference():
    features, weight, bias = cpu_inputs(1, 8, 5, 5)
    implementation = depthwise.depthwise_conv.implementation
    assert implementation(features, weight, bias) == "reference"
    with torch.no_grad():
        assert implementation(features, weight, bias) == "onednn"
        assert implementation(features, weight, bias, "pre") == "reference"
        assert implementation(features.contiguous(), weight, bias) == "reference"
        assert implementation(features.double(), weight, bias) == "reference"
        with torch.autocast("cpu", torch.bfloat16):
            assert implementation(features, weight, bias) == "reference"
        with FlopCounterMode(display=False):
            assert implementation(features, weight, bias) == "reference"
        with ops.enabled(False):
            assert implementation(features, weight, bias) == "reference"


# 5x5 and 7x7 with GELU.


class DepthwiseGelu:
    """`depthwise_gelu` as a function of tensors."""

    def convolution(self, weight: Tensor, bias: Tensor) -> nn.Conv2d:
        channels, side = weight.shape[0], weight.shape[2]
        conv = nn.Conv2d(channels, channels, side, padding=side // 2, groups=channels)
        conv._parameters.clear()
        conv.weight, conv.bias = weight, bias  # type: ignore[assignment] (plain tensors, so that gradients reach them)
        return conv

    def implementation(self, features, weight, bias):
        return depthwise.depthwise_gelu.implementation(features, self.convolution(weight, bias))

    def __call__(self, features, weight, bias):
        return depthwise.depthwise_gelu(features, self.convolution(weight, bias))

    def reference(self, features, weight, bias):
        return depthwise.depthwise_gelu.reference(features, self.convolution(weight, bias))


@needs_triton
@pytest.mark.parametrize("size", WIDE_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_depthwise_gelu_matches_reference(size, dtype):
    check(DepthwiseGelu(), *inputs_of(*size[:4], dtype=dtype, side=size[4]))


@needs_triton
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 11])
def test_depthwise_gelu_strips_join_without_a_seam(rows, monkeypatch):
    monkeypatch.setattr(depthwise, "MAX_STRIP_ROWS", rows)
    monkeypatch.setattr(depthwise, "MAX_WARPS", 1)
    check(DepthwiseGelu(), *inputs_of(1, 8, 11, 5, side=7), backward=False)


@needs_triton
def test_depthwise_gelu_of_a_batch_equals_single_images():
    """Also next to images that are NaN: nothing outside the image is read."""
    features, weight, bias = inputs_of(3, 20, 6, 9, side=7)
    with kernels_allowed():
        batched = DepthwiseGelu()(features, weight, bias)
        for image, y in zip(features, batched, strict=True):
            single = image[None].contiguous(memory_format=torch.channels_last)
            assert torch.equal(DepthwiseGelu()(single, weight, bias)[0], y)
        features[0] = features[2] = float("nan")
        assert torch.equal(DepthwiseGelu()(features, weight, bias)[1], batched[1])


@needs_triton
def test_depthwise_gelu_writes_all_of_its_outputs(monkeypatch):
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, **options: empty_like(x, **options).fill_(float("nan")))
    for size in WIDE_SIZES[:5]:
        with kernels_allowed():
            results = outputs_and_gradients(DepthwiseGelu(), inputs_of(*size[:4], side=size[4]), True)
        assert all(value.isfinite().all() for value in results)


@needs_triton
def test_depthwise_gelu_casts_to_the_autocast_dtype():
    features, weight, bias = inputs_of(1, 8, 5, 5, side=7)
    with kernels_allowed(), torch.autocast(DEVICE, HALF):
        assert DepthwiseGelu()(features, weight, bias).dtype == HALF


@needs_triton
def test_depthwise_gelu_uses_reference_for_other_convolutions():
    features = features_of(1, 8, 9, 8)
    convs = [
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
    usual = nn.Conv2d(8, 8, 7, padding=3, groups=8)
    implementation = depthwise.depthwise_gelu.implementation
    with kernels_allowed():
        assert [implementation(features, conv) for conv in convs] == ["reference"] * 11
        assert implementation(features, usual) == "triton"
        assert implementation(features.contiguous(), usual) == "reference"
        usual.register_forward_hook(lambda *_: None)
        assert implementation(features, usual) == "reference"


@needs_triton
def test_depthwise_gelu_compiles_three_tiles_for_all_sizes():
    conv = nn.Conv2d(96, 96, 7, padding=3, groups=96).to(DEVICE)
    with kernels_allowed(), torch.no_grad(), record_specializations(execute=False) as compiled:
        for size in range(1, 90):
            depthwise.depthwise_gelu(features_of(size % 3, 96, size % 40 + 1, size), conv)
    assert len(compiled) == 3
