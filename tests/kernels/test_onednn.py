"""The CPU's inference path against the plain layers: same numbers, and only where nothing else is at work."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from saccade.kernels import depthwise, enabled, onednn
from saccade.layers.attention import SelfAttention
from saccade.layers.mlp import ConvMlp

pytestmark = pytest.mark.skipif(not onednn.AVAILABLE, reason="this build of PyTorch has no oneDNN")


def features(batch=3, dim=12, height=9, width=7):
    values = torch.randn(batch, dim, height, width, generator=torch.Generator().manual_seed(dim))
    return values.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("act_first", [True, False])
@pytest.mark.parametrize("shortcut", [True, False])
@pytest.mark.parametrize("images_at_once", [1, 2, 100])
def test_feed_forward_equals_the_plain_layers(monkeypatch, act_first, shortcut, images_at_once):
    torch.manual_seed(0)
    mlp, x = ConvMlp(12, 48, act_first=act_first, shortcut=shortcut).eval(), features()
    monkeypatch.setattr(onednn, "CHUNK", images_at_once * 4 * 9 * 7 * 48)
    with torch.no_grad():
        fast = mlp(x)
        with enabled(False):
            plain = mlp(x)
    assert fast.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-6)
    assert not torch.equal(fast, plain)  # the fast path was taken


@pytest.mark.parametrize("act", ["", "post"])
@pytest.mark.parametrize("shortcut", [True, False])
def test_depthwise_equals_its_twin(act, shortcut):
    x, weight, bias = features(), torch.randn(12, 1, 3, 3), torch.randn(12)
    kept = weight.clone()
    with torch.no_grad():
        fast = depthwise.depthwise(x, weight, bias, act, shortcut)
    torch.testing.assert_close(fast, depthwise.depthwise_twin(x, weight, bias, act, shortcut), rtol=1e-5, atol=1e-5)
    assert torch.equal(weight, kept)


def test_only_plain_inference_takes_it():
    x = features()
    assert not onednn.suits(x)  # a gradient may be asked for
    with torch.no_grad():
        assert onednn.suits(x)
        assert not onednn.suits(x.double())
        assert not onednn.suits(x.to("meta"))
        with torch.autocast("cpu", torch.bfloat16):
            assert not onednn.suits(x)
        layer, vectors = SelfAttention(12, 2), torch.randn(1, 5, 12)
        with FlopCounterMode(display=False) as counter:  # counts products it knows: they must stay visible
            layer(vectors)
        with enabled(False), FlopCounterMode(display=False) as plain:
            assert not onednn.suits(x)
            layer(vectors)
        assert counter.get_total_flops() == plain.get_total_flops() >= 2 * 5 * 12 * 48


def test_a_layer_somebody_listens_to_or_exchanged_is_called():
    mlp, x, heard = ConvMlp(12, 48).eval(), features(), []
    handle = mlp.fc1.register_forward_hook(lambda *_: heard.append(1))
    with torch.no_grad():
        mlp(x)
    assert heard == [1]
    handle.remove()
    mlp.fc2 = nn.Sequential(nn.Linear(48, 12), nn.Tanh())
    with torch.no_grad():
        assert mlp(x).abs().max() <= 1
