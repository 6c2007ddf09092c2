"""Who attends to whom, seen from outside."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import saccade
from saccade.explain.figures.relations import centres, draw_links, draw_matrix, relation_figure, relations
from saccade.explain.hooks.attention import Attention, attentions
from saccade.explain.observe import observe
from saccade.kernels import enabled
from tests.explain.planted import looking_at, quadrants, step, view


class Asking(nn.Module):
    def forward(self, query, key, mask=None, scale=None):
        return F.scaled_dot_product_attention(query, key, key, attn_mask=mask, scale=scale)


@pytest.mark.parametrize("mask", [None, torch.randn(3, 5), torch.rand(3, 5) > 0.4])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_weights_are_those_that_were_used(mask, scale):
    """Weights times values is what the fused attention returned."""
    if mask is not None and mask.dtype == torch.bool:
        mask[:, 0] = True
    query, key = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 5, 8)
    model = nn.ModuleDict({"3": Asking()})
    with attentions(model) as calls:
        output = model["3"](query, key, mask, scale)
    (call,) = calls
    assert call.name == "3"
    torch.testing.assert_close(call.weights @ key, output)


def test_timms_models_can_be_watched_too():
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=32).eval()
    with torch.no_grad(), attentions(model) as calls:
        model(torch.randn(1, 3, 32, 32))
    assert [call.name for call in calls] == [f"blocks.{i}" for i in range(12)]
    assert calls[0].weights.shape == (1, 3, 5, 5)


def test_watching_changes_nothing_but_rounding():
    """Every module is called while it is watched, where a CPU may otherwise take some of them in one go.

    With that turned off, not even the rounding changes.
    """
    model = saccade.create_model("svit_nano").eval()
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        plain = model(images)
        with attentions(model) as calls:
            torch.testing.assert_close(model(images), plain, atol=1e-6, rtol=0)
        assert torch.equal(model(images), plain)
        with enabled(False):
            alone = model(images)
            with attentions(model):
                assert torch.equal(model(images), alone)
    assert len(calls) == 10
    assert calls[0].after == 0


def test_huge_attention_is_left_out():
    model = saccade.create_model("svit_nano").eval()
    with torch.no_grad(), attentions(model, most=1000) as calls:
        model(torch.randn(1, 3, 64, 64))
    assert all(call.weights.numel() <= 1000 for call in calls)


def test_relations_are_the_mean_over_heads():
    weights = torch.rand(1, 3, 4, 4).softmax(-1)
    one = step(quadrants(), (32, 32), attention=Attention(weights, "blocks.0", 1))
    torch.testing.assert_close(relations(one), weights[0].mean(0))
    assert relations(step(quadrants(), (32, 32))) is None


def test_where_pixels_attend_a_token_stands_for_its_pixels():
    """Pixels of quadrant i attend to token 3 - i alone, so token i is related to token 3 - i alone."""
    labels = quadrants(4).assignment[0].argmax(0)
    weights = F.one_hot(3 - labels, 4).float()[None, None].expand(1, 2, -1, -1)
    one = step(quadrants(4), (32, 32), attention=Attention(weights, "blocks.0", 1))
    torch.testing.assert_close(relations(one), torch.eye(4).flip(1))


def test_tokens_are_drawn_where_they_see():
    at = centres(step(quadrants(4), (32, 32)))
    assert np.abs(at - [[0.25, 0.25], [0.75, 0.25], [0.25, 0.75], [0.75, 0.75]]).max() < 0.06
    at = centres(step(looking_at([(0.3, 0.6)]), (32, 32)))
    assert np.abs(at - [[0.3, 0.6]]).max() < 0.02


def test_the_strongest_link_is_drawn_between_its_tokens():
    picture = view(100, 100, 0).picture
    at, colours = np.array([[0.1, 0.1], [0.9, 0.1], [0.1, 0.9]]), np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255]])
    links = np.array([[0.9, 0.8, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    drawn = draw_links(picture, at, links, colours, most=1)
    assert drawn[10, 50, 0] > 200  # from the red token to the green one, in red
    assert drawn[10, 50, 1] < 60
    assert (drawn[50, 10] == 40).all()  # no line to the blue token
    assert drawn[10, 10].tolist() == [255, 0, 0]


def test_a_large_matrix_is_averaged_and_a_small_one_enlarged():
    small = draw_matrix(np.eye(3, dtype=np.float32), 100)
    assert small.shape == (99, 99, 3)
    assert (small[10, 10] == small[50, 50]).all()
    assert small[10, 10].sum() > small[10, 50].sum()
    assert draw_matrix(np.eye(300, dtype=np.float32), 100).shape == (100, 100, 3)


def test_a_models_relations_are_those_of_its_own_tokens():
    model = saccade.create_model("svit_nano").eval()
    found = observe(model, view(64, 64), (0.5,) * 3, (0.2,) * 3)
    assert [one.attention.name for one in found.steps] == [one.trace.name for one in found.steps]
    for one in found.steps:
        assert relations(one).shape == (16, 16)
        torch.testing.assert_close(relations(one).sum(1), torch.ones(16))
    figure = relation_figure(found, "svit_nano")
    assert [panel.label for panel in figure.panels][1] == "all 16 x 16"
