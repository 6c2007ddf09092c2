"""Norms that learn by the fused kernel learn what the library's do: blocks, stems, lists, running statistics."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import saccade
from saccade.kernels import HAS_TRITON
from saccade.layers import batch_norm, residual
from saccade.layers.batch_norm import learns_fused
from saccade.layers.conv import ConvNormRelu
from saccade.layers.linear import ListNorm
from saccade.models.resnet import LeanBasicBlock, LeanBottleneck

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is nothing to fuse")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def fused(monkeypatch):
    """Let the kernel take tensors of a CPU too, in Triton's interpreter, and count how often it did."""
    taken = []
    original = batch_norm.kernels.batch_norm

    def counted(*args):
        taken.append(args[6:8])  # ReLU, shortcut
        return original(*args)

    monkeypatch.setattr(batch_norm.kernels, "batch_norm", counted)
    for module in (batch_norm, residual):
        monkeypatch.setattr(module, "suits", lambda *tensors: True)
    return taken


def learn(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output, gradients and buffers of one step, from a copy."""
    module, x = deepcopy(module).train(), x.detach().requires_grad_()
    y = module(x)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    parameters = [p for p in module.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(y, [x, *parameters], g)
    return [y.detach(), *gradients, *(buffer.double() for buffer in module.buffers())]


def map_like(*shape: int) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    return x.to(memory_format=torch.channels_last) if x.ndim == 4 else x


def bottleneck(width: int = 8, stride: int = 1, shortcut: bool = False) -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(16, 4 * width, 1, stride=stride, bias=False), nn.BatchNorm2d(4 * width))
    return LeanBottleneck(16 if shortcut else 4 * width, width, stride, downsample=layers if shortcut else None)


CASES = {
    "bottleneck": (bottleneck, (2, 32, 6, 5), [(True, False), (True, False), (True, True)]),
    "with a shortcut of its own": (
        lambda: bottleneck(stride=2, shortcut=True),
        (2, 16, 6, 6),
        [(True, False), (True, False), (False, False), (True, True)],
    ),
    "basic": (lambda: LeanBasicBlock(16, 16), (2, 16, 5, 6), [(True, False), (True, True)]),
    "list": (lambda: ListNorm(12), (2, 9, 12), [(False, False)]),
    "head": (lambda: ConvNormRelu(8, 12, 3), (2, 8, 5, 6), [(True, False)]),
}


@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_learns_what_the_library_learns(name, fused, monkeypatch):
    make, shape, expected = CASES[name]
    torch.manual_seed(0)
    module, x = make().to(DEVICE).to(memory_format=torch.channels_last), map_like(*shape)
    ours = learn(module, x)
    assert [(relu, shortcut is not None) for relu, shortcut in fused] == expected
    with saccade.kernels.enabled(False):
        for part in (batch_norm, residual):
            monkeypatch.setattr(part, "suits", lambda *tensors: False)
        theirs = learn(module, x)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-4)


@needs_triton
@pytest.mark.parametrize("kind", ["synchronised", "no average", "evaluation", "heard", "no gradient", "one value"])
def test_leaves_to_the_library_what_it_cannot_do(kind, fused):
    norm = (
        nn.SyncBatchNorm(4)
        if kind == "synchronised"
        else nn.BatchNorm2d(4, momentum=None if kind == "no average" else 0.1)
    )
    if kind == "heard":
        norm.register_forward_hook(lambda *_: None)
    norm.train(kind != "evaluation")
    x = map_like(1 if kind == "one value" else 2, 4, 1, 1)
    with torch.set_grad_enabled(kind != "no gradient"):
        assert not learns_fused(norm, x)
    assert learns_fused(nn.BatchNorm2d(4), map_like(2, 4, 1, 1))


def test_stochastic_depth_stays_between_norm_and_sum(fused):
    from timm.layers import DropPath

    block = LeanBasicBlock(16, 16, drop_path=DropPath(0.5)).to(DEVICE).train()
    block(map_like(2, 16, 5, 6))
    assert fused == []
