"""cuDNN's convolution with bias, sum and ReLU inside: taken by folded blocks and heads in half precision, and right."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import saccade
from saccade.kernels import cudnn
from saccade.layers import residual
from saccade.layers.conv import ConvNormRelu
from saccade.models.resnet import LeanBasicBlock, LeanBottleneck
from tests.inference.test_optimize import with_statistics

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="cuDNN needs a GPU")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16


def passes(features, weight, bias, stride, padding, dilation, groups, shortcut=None):
    """What cuDNN is said to do, by the library."""
    assert groups == 1
    total = F.conv2d(features, weight, bias, stride, padding, dilation).float()
    return F.relu(total if shortcut is None else total + shortcut).to(features.dtype)


@pytest.fixture
def taken(monkeypatch):
    """Take the road of a GPU on any device; what was called, and whether it had a shortcut."""
    calls, relu, add_relu = [], torch.cudnn_convolution_relu, torch.cudnn_convolution_add_relu
    monkeypatch.setattr(residual, "suits", lambda *_: True)
    if DEVICE == "cpu":
        monkeypatch.setattr(cudnn, "available", lambda _: True)
        relu = passes

        def add_relu(features, weight, shortcut, alpha, *rest):
            assert alpha == 1
            return passes(features, weight, *rest, shortcut=shortcut)

    monkeypatch.setattr(torch, "cudnn_convolution_relu", lambda *args: calls.append(False) or relu(*args))
    monkeypatch.setattr(torch, "cudnn_convolution_add_relu", lambda *args: calls.append(True) or add_relu(*args))
    return calls


def pictures(*shape: int, dtype=HALF) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)
    return values.contiguous(memory_format=torch.channels_last)


def folded(module: nn.Module, dtype=HALF) -> nn.Module:
    return saccade.optimize(with_statistics(module), dtype, torch.channels_last).to(DEVICE)


def down(stride: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(16, width, 1, stride, bias=False), nn.BatchNorm2d(width))


BLOCKS = {
    "bottleneck": (lambda: LeanBottleneck(32, 8), 32, [False, False, True]),
    "bottleneck with a shortcut": (lambda: LeanBottleneck(16, 8, 2, down(2, 32)), 16, [False, False, True]),
    "basic": (lambda: LeanBasicBlock(16, 16), 16, [False, True]),
    "basic with a shortcut": (lambda: LeanBasicBlock(16, 24, 2, down(2, 24)), 16, [False, True]),
    "head": (lambda: ConvNormRelu(16, 24, 3), 16, [False]),
}


@torch.no_grad()
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_folded_block_answers_the_same(name, dtype, taken):
    torch.manual_seed(0)
    make, width, calls = BLOCKS[name]
    block = make()
    copy, x = folded(block, dtype), pictures(2, width, 7, 6, dtype=dtype)
    exact = block.to(DEVICE).double()(x.double())
    assert not taken
    ours = copy(x)
    assert taken == calls
    assert ours.dtype == dtype
    assert (ours.double() - exact).norm() < (2e-2 if dtype == torch.bfloat16 else 3e-3) * exact.norm()


@torch.no_grad()
@pytest.mark.parametrize("name", ["vt_resnet18", "vt_resnet50"])
def test_every_block_of_a_folded_model_takes_it(name, taken):
    copy = folded(saccade.create_model(name, num_classes=5))
    x = copy.forward_stem(pictures(1, 3, 32, 32))
    for stage in (copy.layer1, copy.layer2, copy.layer3):
        x = stage(x)
    blocks = [block for stage in (copy.layer1, copy.layer2, copy.layer3) for block in stage]
    convolutions = 3 if name == "vt_resnet50" else 2
    assert taken == ([False] * (convolutions - 1) + [True]) * len(blocks)


@torch.no_grad()
def test_the_rest_is_left_to_the_other_roads(taken, monkeypatch):
    def asked(conv: nn.Conv2d, x: torch.Tensor, shortcut: torch.Tensor | None = None) -> bool:
        return residual.ends_inside(conv.to(DEVICE), x, shortcut)

    x = pictures(2, 16, 5, 5)
    assert asked(nn.Conv2d(16, 16, 3, padding=1, dtype=HALF), x, x)
    assert not asked(nn.Conv2d(16, 16, 3, padding="same", dtype=HALF), x), "padding to be computed"
    assert not asked(nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect", dtype=HALF), x), "padding of values"
    assert not asked(nn.Conv2d(16, 16, 3, groups=4, dtype=HALF), x), "groups"
    assert not asked(nn.Conv2d(16, 20, 3, dtype=HALF), x), "channels not in eights"
    assert not asked(nn.Conv2d(16, 16, 3, bias=False, dtype=HALF), x), "no bias: nothing was folded"
    assert not asked(nn.Conv2d(16, 16, 3), x.float()), "float32"
    assert not asked(nn.Conv2d(16, 16, 3, dtype=HALF), x.contiguous()), "another order of memory"
    assert not asked(nn.Conv2d(16, 16, 3, dtype=HALF), x, x.contiguous()), "also of the shortcut"
    with torch.autocast(DEVICE, HALF):
        assert not asked(nn.Conv2d(16, 16, 3), x), "a weight to be cast"
        assert not asked(nn.Conv2d(16, 16, 3), x.float()), "a map to be cast"
    monkeypatch.setattr(cudnn, "MOST", x.numel())
    assert not asked(nn.Conv2d(16, 16, 3, dtype=HALF), x), "too many values to count in 32 bits"
    monkeypatch.undo()
    if DEVICE == "cpu":
        assert not cudnn.available(x)


@torch.no_grad()
def test_a_norm_that_was_not_folded_keeps_its_pass(taken):
    block = with_statistics(LeanBasicBlock(16, 16)).to(DEVICE).eval()
    x = pictures(2, 16, 5, 5, dtype=torch.float16)
    block.half()(x)
    assert taken == []


@torch.no_grad()
@pytest.mark.parametrize("groups", [0, 2])
def test_a_head_whose_norm_was_not_folded_answers_the_same(taken, groups, monkeypatch):
    head, x = with_statistics(ConvNormRelu(16, 24, 3, groups)).to(DEVICE), pictures(2, 16, 5, 4, dtype=torch.float32)
    ours = head(x)
    monkeypatch.setattr(residual, "suits", lambda *_: False)
    torch.testing.assert_close(ours, head(x), rtol=1e-4, atol=1e-5)
    assert taken == []


def test_gradients_and_listeners_keep_the_layers(taken):
    copy, x = folded(LeanBasicBlock(16, 16)), pictures(2, 16, 5, 5)
    copy(x)  # gradients may be asked for
    assert taken == []
    heard = []
    copy.conv2.register_forward_hook(lambda *_: heard.append(1))
    with torch.no_grad():
        copy(x)
    assert (taken, heard) == ([], [1])


@needs_gpu
@torch.no_grad()
@pytest.mark.parametrize(("width", "out", "kernel", "stride"), [(64, 256, 1, 1), (64, 64, 3, 1), (128, 128, 3, 2)])
@pytest.mark.parametrize("benchmark", [False, True])
def test_memory_that_is_not_finite_never_shows(width, out, kernel, stride, benchmark, monkeypatch):
    """Without a shortcut the library hands cuDNN the unwritten answer as one, times zero: it must not be read."""
    x = pictures(8, width, 28, 28)
    conv = nn.Conv2d(width, out, kernel, stride, kernel // 2, dtype=HALF, device=DEVICE)
    exact = F.relu(conv.double()(x.double()))
    conv = conv.to(HALF).to(memory_format=torch.channels_last)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
    for _ in range(3):
        poison = torch.full_like(exact, float("nan"), dtype=HALF)
        del poison  # the next tensor of its size lies there
        ours = cudnn.conv_relu(x, conv.weight, conv.bias, conv.stride, conv.padding, conv.dilation)
        assert (ours.double() - exact).norm() < 1e-2 * exact.norm()


@needs_gpu
@torch.no_grad()
def test_a_recording_takes_it(taken):
    torch.manual_seed(0)
    model = with_statistics(saccade.create_model("vt_resnet18", num_classes=5)).cuda()
    graph = saccade.optimize(model, HALF, torch.channels_last, cuda_graph=True)
    for seed in range(2):
        images = torch.randn(2, 3, 64, 64, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed))
        exact = model(images)
        assert (graph(images).float() - exact).norm() < 5e-2 * exact.norm()
    assert taken
