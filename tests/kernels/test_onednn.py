"""The CPU's inference path against the plain layers: same numbers, and only where nothing else is at work."""

import pytest
import torch

from saccade.kernels import depthwise, enabled, onednn

pytestmark = pytest.mark.skipif(not onednn.AVAILABLE, reason="this build of PyTorch has no oneDNN")


def features(batch=3, dim=12, height=9, width=7):
    values = torch.randn(batch, dim, height, width, generator=torch.Generator().manual_seed(dim))
    return values.contiguous(memory_format=torch.channels_last)


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
        with enabled(False):
            assert not onednn.suits(x)
