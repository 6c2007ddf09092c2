"""Attention of one position in ViT, Swin and SViT, and its redundancy."""

import pytest
import timm
import torch

from saccade.explanation.explain import explain
from saccade.explanation.figures.attention import baseline_attention, redundancy
from saccade.explanation.hooks.attention import record_attention


def test_redundancy_of_known_weights():
    """Nothing is redundant in equal weights; with one key of K that counts, 1 - 1 / K."""
    assert redundancy(torch.full((2, 5, 8), 0.125)) == pytest.approx(0)
    assert redundancy(torch.eye(8)) == pytest.approx(1 - 1 / 8)
    half = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    assert redundancy(half) == pytest.approx(0.5)


@pytest.mark.shows("SVIT-57")
def test_global_attention_is_the_row_of_the_anchor():
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2).eval()
    image, anchor = torch.rand(3, 64, 64), (0.3, 0.8)  # patch column 1, row 3 of 4 x 4
    row = baseline_attention(model, image, anchor)
    images = (image[None] - 0.5) / 0.5  # its normalisation
    with torch.no_grad(), record_attention(model) as calls:
        model(images)
    weights = calls[0].weights[0].mean(0)  # (17, 17), the class token first
    torch.testing.assert_close(row.map.flatten(), weights[1 + 3 * 4 + 1, 1:], atol=1e-5, rtol=1e-4)
    assert (row.kind, row.keys) == ("global", 17)
    assert row.redundancy == pytest.approx(redundancy(calls[0].weights[0, :, 1:]), abs=1e-4)


@pytest.mark.shows("SVIT-57")
def test_window_attention_is_zero_outside_the_window():
    torch.manual_seed(0)
    model = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=112, depths=(1, 1, 1, 1), embed_dim=24, num_heads=(1, 2, 4, 8)
    ).eval()
    row = baseline_attention(model, torch.rand(3, 112, 112), (0.4, 0.9))  # row 25, column 11 of 28 x 28
    assert (row.kind, row.keys, tuple(row.map.shape)) == ("window", 49, (28, 28))
    inside = row.map[21:28, 7:14]
    assert inside.sum().item() == pytest.approx(1, abs=1e-4)
    assert row.map.sum().item() == pytest.approx(1, abs=1e-4)
    assert inside.min() > 0
    relative = model.layers[0].blocks[0].attn
    with torch.no_grad():
        relative.qkv.weight.zero_()
        relative.qkv.bias.zero_()
        relative.relative_position_bias_table.zero_()
        # towards the key to the right of the query: (dy, dx) = (0, 1) is row (0 + 6) * 13 + (-1 + 6) of the table
        relative.relative_position_bias_table[6 * 13 + 5] = 20
    moved = baseline_attention(model, torch.rand(3, 112, 112), (0.4, 0.9)).map
    assert divmod(int(moved.argmax()), 28) == (25, 12)


@pytest.mark.shows("SVIT-57")
def test_explain_draws_baselines_beside_super_tokens(cat):
    torch.manual_seed(0)
    vit = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1)
    swin = timm.create_model("swin_tiny_patch4_window7_224", img_size=112, depths=(1, 1, 1, 1))
    image = explain(cat, "svit_nano", importance=(), compare=(vit, swin))[0]
    captions = [panel.note for panel in image.figures["attention"].panels]
    assert [caption.partition(",")[0] for caption in captions] == [
        "global attention", "window attention", "super token attention"
    ]  # fmt: skip
    assert all("redundancy" in caption for caption in captions)
    assert len([key for key in image.arrays if key.startswith("attention/")]) == 3


def test_models_without_super_tokens_or_attention_are_refused(cat):
    with pytest.raises(ValueError, match="compare is for super token attention"):
        explain(cat, "vt_nano", importance=(), compare=(timm.create_model("vit_tiny_patch16_224", img_size=64),))
    with pytest.raises(ValueError, match="expected a ViT or Swin of timm to compare with"):
        baseline_attention(timm.create_model("resnet10t"), torch.rand(3, 64, 64), (0.5, 0.5))
