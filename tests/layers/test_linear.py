"""The linear layer with the GELU inside: as close to the exact one as its type can tell."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.library import opcheck

from saccade.layers import linear
from saccade.layers.linear import fits_gelu, linear_gelu, linear_whole
from saccade.layers.mlp import ConvMlp, TokenMlp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def inside(monkeypatch):
    """Take the road of a GPU on any device, and count."""
    taken = []
    original = linear.gelu_inside
    monkeypatch.setattr(linear, "suits", lambda *_: True)
    monkeypatch.setattr(linear, "gelu_inside", lambda *args: taken.append(1) or original(*args))
    return taken


@torch.no_grad()
@pytest.mark.parametrize("autocast", [False, True])
def test_gelu_inside_is_gelu(inside, autocast):
    torch.manual_seed(0)
    layer, vectors = nn.Linear(40, 56).to(DEVICE), 2 * torch.randn(3, 7, 40, device=DEVICE)
    exact = F.gelu(layer.double()(vectors.double()))
    layer = layer.float() if autocast else layer.bfloat16()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        ours = linear_gelu(layer, vectors if autocast else vectors.bfloat16())
    assert inside == [1]
    assert ours.dtype == torch.bfloat16
    assert ours.shape == exact.shape
    assert (ours.double() - exact).norm() < 1e-2 * exact.norm()


@torch.no_grad()
@pytest.mark.parametrize("make", [lambda: TokenMlp(16, 64), lambda: ConvMlp(16, 64), lambda: ConvMlp(16, 64, False)])
def test_a_perceptron_answers_the_same(inside, make):
    torch.manual_seed(0)
    part = make().to(DEVICE).eval()
    shape = (2, 9, 16) if isinstance(part, TokenMlp) else (2, 16, 5, 4)
    x = torch.randn(shape, device=DEVICE)
    x = x if x.ndim == 3 else x.contiguous(memory_format=torch.channels_last)
    exact = part.double()(x.double())
    assert inside == []
    ours = part.bfloat16()(x.bfloat16())
    assert inside == ([1] if not isinstance(part, ConvMlp) or part.conv.act == "pre" else [])
    assert (ours.double() - exact).norm() < 2e-2 * exact.norm()


def test_leaves_gradients_float32_and_listeners_alone(inside):
    layer, vectors = nn.Linear(8, 8).bfloat16(), torch.randn(3, 8).bfloat16()
    assert not fits_gelu(layer, vectors)  # gradients
    with torch.no_grad():
        assert fits_gelu(layer, vectors)
        assert not fits_gelu(layer, vectors.float())
        assert not fits_gelu(layer, torch.randn(8, 3).bfloat16().t())
        layer.register_forward_hook(lambda *_: None)
        assert not fits_gelu(layer, vectors)


@torch.no_grad()
def test_compilers_take_it_whole(monkeypatch):
    monkeypatch.setattr(linear, "suits", lambda *_: True)
    part, vectors = TokenMlp(16, 64).bfloat16().eval(), torch.randn(2, 9, 16).bfloat16()
    taken = []

    def look(module: torch.fx.GraphModule, _):
        taken.extend(node.target for node in module.graph.nodes if node.op == "call_function")
        return module

    answer = torch.compile(part, backend=look, fullgraph=True)(vectors)
    assert torch.ops.saccade.linear_gelu.default in taken
    assert torch.equal(answer, part(vectors))
    opcheck(torch.ops.saccade.linear_gelu.default, (vectors[0], part.fc1.weight, part.fc1.bias),
            test_utils=("test_schema", "test_faketensor"))  # fmt: skip


@pytest.mark.parametrize("learning", [False, True])
def test_compilers_leave_a_layer_with_odd_rows_to_the_library(monkeypatch, learning):
    monkeypatch.setattr(linear, "suits", lambda *_: True)
    torch.manual_seed(0)
    layer, vectors = linear.Linear(16, 27), torch.randn(2, 9, 16)
    vectors.requires_grad_(learning)
    taken = []

    def look(module: torch.fx.GraphModule, _):
        taken.extend(node.target for node in module.graph.nodes if node.op == "call_function")
        return module

    torch.compiler.reset()
    run = torch.compile(lambda x: linear_whole(layer, x), backend=look, fullgraph=True)
    with torch.set_grad_enabled(learning), torch.autocast("cpu", torch.bfloat16):
        ours, expected = run(vectors), layer(vectors)
    assert torch.ops.saccade.linear.default in taken
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, expected)
    if learning:
        g, given = torch.randn(2, 9, 27).bfloat16(), (vectors, *layer.parameters())
        for a, b in zip(torch.autograd.grad(ours, given, g), torch.autograd.grad(expected, given, g), strict=True):
            assert a.dtype == b.dtype
            assert (a - b).norm() <= 1e-2 * b.norm()


def test_the_plain_layer_keeps_its_word():
    given = [torch.randn(size, requires_grad=True) for size in ((5, 4), (3, 4), (3,))]
    opcheck(torch.ops.saccade.linear.default, given)
