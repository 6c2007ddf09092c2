"""A norm's output that nobody keeps: the same gradients, computed again once, memory given back meanwhile."""

import weakref
from copy import deepcopy

import pytest
import torch
from torch import nn

import saccade
from saccade.kernels import HAS_TRITON
from saccade.layers import batch_norm, forget
from saccade.layers.forget import forgotten, normed_into
from saccade.layers.norm import ChannelNorm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernels run in Triton's interpreter


def test_gradients_are_the_same_and_nothing_is_kept():
    torch.manual_seed(0)
    first, second = nn.Linear(6, 9), nn.Linear(6, 5)
    x = torch.randn(4, 6, requires_grad=True)
    made = []

    def step(forgetting: bool):
        y = x.sin()  # keeps x, not y

        def again():
            made.append(1)
            return x.detach().sin()

        if forgetting:
            with forgotten(y, again):
                out = first(y).sum() + second(y.view(2, 2, 6)).square().sum()
        else:
            out = first(y).sum() + second(y.view(2, 2, 6)).square().sum()
        gone = weakref.ref(y)
        del y
        return out, gone

    wanted = [x, *first.parameters(), *second.parameters()]
    out, gone = step(True)
    assert gone() is None
    ours = torch.autograd.grad(out, wanted)
    assert made == [1]  # once for both readers
    for a, b in zip(ours, torch.autograd.grad(step(False)[0], wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_backward_twice_computes_it_twice():
    weight = torch.ones(3, requires_grad=True)
    x, made = torch.randn(3), []
    y = x.exp()
    with forgotten(y, lambda: made.append(1) or x.exp()):
        out = (y * weight).sum()
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(out, weight, retain_graph=True)[0], x.exp())
    assert len(made) == 2


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is nothing to fuse")
@pytest.mark.parametrize("name", ["svit_nano", "paca_nano"])
def test_a_model_learns_the_same(name, monkeypatch):
    torch.manual_seed(0)
    model = saccade.create_model(name, num_classes=3).to(DEVICE).train()
    images = torch.randn(2, 3, 64, 64).to(DEVICE)

    def learn(model):
        found = model(images)
        found.square().sum().backward()
        return [found.detach(), *(p.grad for p in model.parameters()), *model.buffers()]

    with saccade.kernels.enabled(False):
        expected = learn(deepcopy(model))
    calls = []
    original = forget.forgotten
    monkeypatch.setattr(forget, "forgotten", lambda *args: calls.append(1) or original(*args))
    for module in (forget, batch_norm):
        monkeypatch.setattr(module, "suits", lambda *_: True)
    ours = learn(deepcopy(model))
    blocks = sum(len(stage.blocks) for stage in model.stages)
    assert len(calls) == 2 * blocks
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3 * float(b.abs().max()) + 1e-6)


def test_a_plain_norm_is_called_as_ever():
    norm, x = ChannelNorm(4), torch.randn(2, 4, 3, 3)
    torch.testing.assert_close(normed_into(norm, lambda y, factor: factor * y, x, 2), 2 * norm(x), rtol=0, atol=0)
