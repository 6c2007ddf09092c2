"""`record_attention`: attention weights of a forward pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import saccade
from saccade.explanation.hooks.attention import record_attention
from saccade.ops import enabled


class CrossAttention(nn.Module):
    def forward(self, query, key, mask=None, scale=None):
        return F.scaled_dot_product_attention(query, key, key, attn_mask=mask, scale=scale)


@pytest.mark.parametrize("mask", [None, torch.randn(3, 5), torch.rand(3, 5) > 0.4])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_weights_reproduce_the_output(mask, scale):
    if mask is not None and mask.dtype == torch.bool:
        mask[:, 0] = True
    query, key = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 5, 8)
    model = nn.ModuleDict({"3": CrossAttention()})
    with record_attention(model) as calls:
        output = model["3"](query, key, mask, scale)
    (call,) = calls
    assert call.name == "3"
    torch.testing.assert_close(call.weights @ key, output)


def test_attention_without_a_head_axis_gets_one():
    model = CrossAttention()
    with record_attention(model) as calls:
        model(torch.randn(2, 3, 8), torch.randn(2, 5, 8))
    assert calls[0].weights.shape == (2, 1, 3, 5)


def test_attention_of_timm_models_is_recorded():
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=32).eval()
    with torch.no_grad(), record_attention(model) as calls:
        model(torch.randn(1, 3, 32, 32))
    assert [call.name for call in calls] == [f"blocks.{i}" for i in range(12)]
    assert calls[0].weights.shape == (1, 3, 5, 5)


def test_record_attention_changes_the_output_by_rounding_only():
    """Hooks disable fused CPU kernels; with those switched off, the outputs are bit-identical."""
    model = saccade.create_model("svit_nano").eval()
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        plain = model(images)
        with record_attention(model) as calls:
            torch.testing.assert_close(model(images), plain, atol=1e-6, rtol=0)
        assert torch.equal(model(images), plain)
        with enabled(False):
            reference = model(images)
            with record_attention(model):
                assert torch.equal(model(images), reference)
    assert len(calls) == 10
    assert calls[0].num_traces == 0


def test_attention_counts_the_traces_before_each_call():
    model = saccade.create_model("svit_nano").eval()
    with torch.no_grad(), saccade.record(model) as traces, record_attention(model, traces) as calls:
        model(torch.randn(1, 3, 64, 64))
    assert [call.num_traces for call in calls] == [1, 2, 3, 3, 3, 3, 3, 3, 3, 3]


def test_attention_above_max_weights_is_skipped():
    model = saccade.create_model("svit_nano").eval()
    with torch.no_grad(), record_attention(model) as every:
        model(torch.randn(1, 3, 64, 64))
    largest = max(call.weights.numel() for call in every)
    with torch.no_grad(), record_attention(model, max_weights=largest - 1) as calls:
        model(torch.randn(1, 3, 64, 64))
    assert len(calls) == sum(call.weights.numel() < largest for call in every) > 0
    assert max(call.weights.numel() for call in calls) < largest
