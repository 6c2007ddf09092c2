"""Norm, sum and ReLU in one pass against the library, and a whole ResNet block against timm's."""

import pytest
import torch
from timm.models.resnet import BasicBlock, Bottleneck, downsample_conv
from torch import nn

import saccade
from saccade.kernels import HAS_TRITON, norm_relu
from saccade.layers import residual
from saccade.models.resnet import LeanBasicBlock, LeanBottleneck

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernel runs in Triton's interpreter
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def values(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def some_norm(channels: int) -> norm_relu.Norm:
    return norm_relu.Norm(
        values(channels), values(channels + 1)[1:], values(channels + 2)[2:], values(channels).abs() + 0.5, 1e-5
    )


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is no kernel to compare")
@pytest.mark.parametrize("shape", [(2, 20, 5, 7), (1, 300, 3, 3)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (HALF, 1e-2)])
@pytest.mark.parametrize("norm", ["norm", "bias"])
@pytest.mark.parametrize("shortcut", ["none", "plain", "norm", "bias"])
def test_equals_its_twin(shape, dtype, tolerance, norm, shortcut):
    features = values(*shape, dtype=dtype).contiguous(memory_format=torch.channels_last)
    other = values(*shape, dtype=dtype).flip(0).contiguous(memory_format=torch.channels_last)
    kinds = {"norm": some_norm(shape[1]), "bias": norm_relu.Norm(values(shape[1])), "plain": None}
    extra = () if shortcut == "none" else (other, kinds[shortcut])
    exact = norm_relu.norm_relu_twin(
        features.float(), kinds[norm], *(v if v is None or isinstance(v, tuple) else v.float() for v in extra)
    )
    ours = norm_relu.norm_relu(features.clone(), kinds[norm], *extra)
    assert (ours.double() - exact.double()).norm() < tolerance * exact.double().norm()


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is no kernel to compare")
def test_a_value_that_is_not_finite_shows():
    features = values(1, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    features[0, 2, 1, 1] = float("nan")
    assert norm_relu.norm_relu(features, norm_relu.Norm(values(4))).isnan().nonzero().tolist() == [[0, 2, 1, 1]]


@torch.no_grad()
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("lean", "plain"), [(LeanBasicBlock, BasicBlock), (LeanBottleneck, Bottleneck)])
@pytest.mark.parametrize("folded", [False, True])
def test_a_lean_block_answers_as_timms(monkeypatch, lean, plain, stride, folded):
    torch.manual_seed(0)
    planes, width = 4, 4 * plain.expansion
    down = downsample_conv(width, width, 1, stride) if stride > 1 else None
    theirs = plain(width, planes, stride, down)
    for module in theirs.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    ours = lean(width, planes, stride, downsample_conv(width, width, 1, stride) if stride > 1 else None)
    ours.load_state_dict(theirs.state_dict())
    ours, theirs = ours.to(DEVICE).eval(), theirs.to(DEVICE).eval()
    x = values(2, width, 6, 5).contiguous(memory_format=torch.channels_last)
    expected = theirs(x)
    torch.testing.assert_close(ours(x), expected, rtol=1e-4, atol=1e-5)
    ours = saccade.optimize(ours) if folded else ours
    monkeypatch.setattr(
        residual, "suits", lambda *_: True
    )  # on a CPU, what a GPU would do, with the twin of the kernel
    assert ours.lean(x)
    torch.testing.assert_close(ours.answer(x), expected, rtol=1e-4, atol=1e-5)
    heard = []
    ours.conv2.register_forward_hook(lambda *_: heard.append(1))
    assert not ours.lean(x)
    ours(x)
    assert heard == [1]
