"""VT-FPN: tokens of all levels through one transformer, and back onto every level."""

import pytest
import torch
from torch import nn

from saccade.heads.fpn import FPN
from saccade.heads.vt_fpn import VTPyramid, VTPyramidLayer, vt_fpn_head
from saccade.layers.relation import VisualTokenTransformer


def make_pyramid(channels=(16, 32, 64, 128)):
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(2, c, 16 // 2**i, 24 // 2**i, generator=rng) for i, c in enumerate(channels)]


def start_norms_at_one(module):
    """The authors start the norms of residual paths at zero, which hides what they carry."""
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm1d):
            nn.init.ones_(norm.weight)


@pytest.mark.shows("VT-67", "VTR-01")
def test_neck_starts_as_its_1x1_convolutions():
    """Zero-initialised norms: a level that already has `dim` channels passes unchanged. Shapes are FPN's."""
    pyramid = make_pyramid()
    channels = [features.shape[1] for features in pyramid]
    neck = VTPyramid(channels, 16, token_dim=32, num_tokens=2, num_heads=4).eval()
    outputs = neck(pyramid)
    assert [m.shape for m in outputs] == [m.shape for m in FPN(channels, 16)(pyramid)]
    torch.testing.assert_close(outputs[0], pyramid[0])


@pytest.mark.shows("VT-64", "VT-65", "VT-66", "VTR-13")
def test_layer_groups_relates_and_projects():
    """One tokenizer and projector per level, one transformer over the concatenation, tokens split back per level."""
    torch.manual_seed(0)
    pyramid, counts = make_pyramid(), [5, 4, 3, 2]
    layer = VTPyramidLayer([16, 32, 64, 128], 16, 32, counts, 4, first=True).eval()
    start_norms_at_one(layer)
    with torch.no_grad():
        tokens = [tokenizer(x)[0] for tokenizer, x in zip(layer.tokenizers, pyramid, strict=True)]
        assert [t.shape[1] for t in tokens] == counts
        related = layer.relation(torch.cat(tokens, 1))
        starts = [0, 5, 9, 12]
        levels = [related[:, start : start + count] for start, count in zip(starts, counts, strict=True)]
        expected = [p(x, t) for p, x, t in zip(layer.projectors, pyramid, levels, strict=True)]
        outputs, new_tokens = layer(pyramid, None)
    assert [type(m) for m in layer.relation.modules()].count(VisualTokenTransformer) == 1
    for output, reference in zip(outputs + new_tokens, expected + levels, strict=True):
        torch.testing.assert_close(output, reference)


@pytest.mark.shows("VT-65")
def test_levels_exchange_information_through_tokens():
    torch.manual_seed(0)
    neck = VTPyramid([16, 16], 16, token_dim=32, num_tokens=2, num_heads=4).eval()
    start_norms_at_one(neck)
    fine, coarse = torch.randn(1, 16, 8, 8), torch.randn(1, 16, 4, 4)
    with torch.no_grad():
        before, after = neck([fine, coarse])[0], neck([fine, coarse + 1])[0]
    assert (before - after).abs().max() > 1e-3


def test_second_layer_reads_the_maps_and_tokens_of_the_first():
    torch.manual_seed(0)
    neck = VTPyramid((16, 32), 16, token_dim=32, num_tokens=3, num_heads=4, layers=2).eval()
    pyramid = make_pyramid()[:2]
    start_norms_at_one(neck)
    with torch.no_grad():
        maps, tokens = neck.layers[0](pyramid, None)
        expected, _ = neck.layers[1](maps, tokens)
        unrelated, _ = neck.layers[1](maps, [t.flip(1) + 1 for t in tokens])
        outputs = neck(pyramid)
    for output, reference, other in zip(outputs, expected, unrelated, strict=True):
        torch.testing.assert_close(output, reference)
        assert (output - other).abs().max() > 1e-4


@pytest.mark.shows("VT-64")
def test_defaults_are_8_tokens_of_1024_channels_per_level():
    neck = vt_fpn_head((256, 512, 1024, 2048), 20).neck
    (layer,) = neck.layers
    assert layer.num_tokens == [8, 8, 8, 8]
    assert [tokenizer(torch.randn(2, c, 4, 4))[0].shape for tokenizer, c in zip(
        layer.tokenizers, (256, 512, 1024, 2048), strict=True)] == [(2, 8, 1024)] * 4  # fmt: skip


def test_wrong_number_of_token_counts_is_refused():
    with pytest.raises(ValueError, match=r"num_tokens must be one number or 2, one per level; got \(8, 8, 8\)"):
        VTPyramid((16, 32), num_tokens=(8, 8, 8))
