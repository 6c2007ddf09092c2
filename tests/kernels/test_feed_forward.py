"""The feed-forward part as one function of autograd's against the layers one by one."""

import copy

import pytest
import torch
from torch import nn

from saccade import ops
from saccade.kernels import HAS_TRITON
from saccade.layers import batch_norm
from saccade.layers import mlp as layers
from saccade.layers.mlp import ConvMlp
from saccade.layers.norm import ChannelNorm
from saccade.ops.layer_norm import prenorm, trainable_norm

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is no kernel to compare")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernels run in Triton's interpreter
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # which NumPy, and so the interpreter, has


def maps(*shape: int, dtype=HALF) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)
    return values.contiguous(memory_format=torch.channels_last)


@pytest.fixture
def taken(monkeypatch):
    """As on a GPU; and how often the function was called."""
    calls = []
    for module in (layers, batch_norm):
        monkeypatch.setattr(module, "suits", lambda *_: True)
    monkeypatch.setattr(layers, "feed_forward", lambda *given, run=layers.feed_forward: calls.append(1) or run(*given))
    with ops.interpreted():
        yield calls


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("act_first", "shortcut"), [(True, True), (False, True), (False, False)])
def test_learns_what_the_layers_learn(act_first, shortcut, autocast, taken):
    torch.manual_seed(0)
    mlp = ConvMlp(8, 24, act_first, shortcut=shortcut).to(DEVICE, torch.float32 if autocast else HALF)
    exact = copy.deepcopy(mlp).double()
    x, g = maps(2, 8, 5, 7).requires_grad_(), maps(2, 8, 5, 7)
    with torch.autocast(DEVICE, HALF, enabled=autocast):
        y = mlp(x)
        found = torch.autograd.grad(y, [x, *mlp.parameters()], g)  # inside, as some have it
    assert taken == [1]
    assert y.is_contiguous(memory_format=torch.channels_last)
    x64 = x.detach().double().requires_grad_()
    y64 = exact(x64)
    wanted = torch.autograd.grad(y64, [x64, *exact.parameters()], g.double())
    for a, b in zip([y, *found], [y64, *wanted], strict=True):
        assert (a.double() - b).norm() < 1e-2 * b.norm()
    assert [a.dtype for a in found] == [x.dtype, *(parameter.dtype for parameter in mlp.parameters())]


NORMS = {"batch": nn.BatchNorm2d, "layer": ChannelNorm}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("kind", "act_first"), [("batch", True), ("layer", False)])
def test_learns_with_the_norm_before_it(kind, act_first, autocast, taken):
    torch.manual_seed(0)
    dtype = torch.float32 if autocast else HALF
    parts = nn.ModuleList([NORMS[kind](8), ConvMlp(8, 24, act_first)]).to(DEVICE)
    nn.init.normal_(parts[0].weight)
    nn.init.normal_(parts[0].bias)
    exact = copy.deepcopy(parts).double()
    parts[1].to(dtype)
    x, g = maps(2, 8, 5, 7).requires_grad_(), maps(2, 8, 5, 7)
    with torch.autocast(DEVICE, HALF, enabled=autocast):
        y = prenorm(*parts, x)
    assert taken == [1]
    found = torch.autograd.grad(y, [x, *parts.parameters()], g)
    x64 = x.detach().double().requires_grad_()
    y64 = exact[1](exact[0](x64))
    wanted = torch.autograd.grad(y64, [x64, *exact.parameters()], g.double())
    for a, b in zip([y, *found], [y64, *wanted], strict=True):
        assert (a.double() - b).norm() < 1e-2 * b.norm()
    for a, b in zip(parts[0].buffers(), exact[0].buffers(), strict=True):  # statistics that run along, and their count
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", NORMS)
def test_what_the_norm_answers_is_not_kept(kind, taken):
    norm, mlp, x = NORMS[kind](8).to(DEVICE), ConvMlp(8, 16).to(DEVICE, HALF), maps(1, 8, 3, 4).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda value: kept.append(value) or value, lambda value: value):
        prenorm(norm, mlp, x)
    alike = [value for value in kept if value.numel() == x.numel()]
    assert [value.data_ptr() for value in alike] == [x.data_ptr()]


def test_a_norm_that_is_listened_to_or_stands_still_is_called(taken):
    mlp, x = ConvMlp(8, 16).to(DEVICE, HALF), maps(2, 8, 3, 4).requires_grad_()
    heard, met = nn.BatchNorm2d(8).to(DEVICE, HALF), []
    heard.register_forward_hook(lambda *_: met.append(1))
    prenorm(heard, mlp, x)
    assert met == [1]
    still = nn.BatchNorm2d(8).to(DEVICE, HALF).eval()
    assert trainable_norm(still, x) is None
    prenorm(still, mlp, x).float().sum().backward()
    assert int(still.num_batches_tracked) == 0
    mlp.register_forward_hook(lambda *_: met.append(2))
    prenorm(still.train(), mlp, x)
    assert met == [1, 2]


def test_an_image_needs_no_gradient(taken):
    mlp = ConvMlp(8, 16).to(DEVICE, HALF)
    mlp(maps(1, 8, 3, 3)).float().sum().backward()
    assert taken == [1]
    assert all(parameter.grad is not None for parameter in mlp.parameters())


def test_checkpoints_compute_it_again(taken):
    mlp = ConvMlp(8, 16).to(DEVICE, HALF)
    x = maps(1, 8, 3, 3).requires_grad_()
    wanted = torch.autograd.grad(mlp(x).float().square().sum(), x)[0]
    y = torch.utils.checkpoint.checkpoint(mlp, x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(y.float().square().sum(), x)[0], wanted)
    assert len(taken) == 3


def frozen(mlp: ConvMlp) -> None:
    mlp.fc2.bias.requires_grad_(False)


def listened_to(mlp: ConvMlp) -> None:
    mlp.conv.register_forward_hook(lambda *_: None)


def adapted(mlp: ConvMlp) -> None:
    mlp.fc1 = nn.Sequential(mlp.fc1)


def wide(mlp: ConvMlp) -> None:
    mlp.float()


@pytest.mark.parametrize("change", [frozen, listened_to, adapted, wide])
def test_leaves_the_rest_to_the_layers(change, taken):
    mlp = ConvMlp(8, 16).to(DEVICE, HALF)
    change(mlp)
    dtype = torch.float32 if change is wide else HALF
    assert not mlp.learns_whole(maps(1, 8, 3, 3, dtype=dtype))


def test_dropout_inside_is_left_to_the_layers(taken):
    inside, plain = ConvMlp(8, 16, False, drop=0.5).to(DEVICE, HALF), ConvMlp(8, 16, False).to(DEVICE, HALF)
    x = maps(1, 8, 3, 3)
    assert plain.learns_whole(x)
    assert not inside.learns_whole(x)
    assert inside.eval().learns_whole(x)
    assert not ConvMlp(8, 16, conv=False).to(DEVICE, HALF).learns_whole(x)
    assert not ConvMlp(8, 16, sub_norm=True).to(DEVICE, HALF).learns_whole(x)
    assert not plain.learns_whole(x.contiguous())
    with torch.no_grad():
        assert not plain.learns_whole(x)
