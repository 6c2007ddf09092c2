"""Attention among tokens, as matrices and links."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import saccade
from saccade.explanation.figures.relations import (
    draw_links,
    draw_matrix,
    relation_figure,
    token_centres,
    token_relations,
)
from saccade.explanation.hooks.attention import Attention
from saccade.explanation.observe import observe
from tests.explanation.planted import observation, quadrants, region_trace, step, view


def test_relations_are_the_mean_over_heads():
    weights = torch.rand(1, 3, 4, 4).softmax(-1)
    one = step(quadrants(), (32, 32), attention=Attention(weights, "blocks.0", 1))
    torch.testing.assert_close(token_relations(one), weights[0].mean(0))


def test_relations_without_attention_are_none():
    one = step(quadrants(), (32, 32))
    assert token_relations(one) is None
    assert relation_figure(observation(view(32, 32), one), "a_model") is None


def test_relations_of_pixel_queries_are_averaged_by_assignment():
    """Pixels of quadrant i attend to token 3 - i alone, so token i is related to token 3 - i alone."""
    labels = quadrants(4).assignment[0].argmax(0)
    weights = F.one_hot(3 - labels, 4).float()[None, None].expand(1, 2, -1, -1)
    one = step(quadrants(4), (32, 32), attention=Attention(weights, "blocks.0", 1))
    torch.testing.assert_close(token_relations(one), torch.eye(4).flip(1))


def test_token_centres_are_the_peaks_of_the_maps():
    centres = token_centres(step(quadrants(4), (32, 32)))
    assert np.abs(centres - [[0.25, 0.25], [0.75, 0.25], [0.25, 0.75], [0.75, 0.75]]).max() < 0.06
    centres = token_centres(step(region_trace([(0.3, 0.6)]), (32, 32)))
    assert np.abs(centres - [[0.3, 0.6]]).max() < 0.02


def test_strongest_link_is_drawn_between_its_tokens():
    centres = np.array([[0.1, 0.1], [0.9, 0.1], [0.1, 0.9]])
    colours = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255]])
    links = np.array([[0.9, 0.8, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    drawn = draw_links(view(100, 100, 0).canvas, centres, links, colours, max_links=1)
    assert drawn[10, 50, 0] > 200  # from the red token to the green one, in red
    assert drawn[10, 50, 1] < 60
    assert (drawn[50, 10] == 40).all()  # no line to the blue token
    assert drawn[10, 10].tolist() == [255, 0, 0]


def test_matrix_is_enlarged_or_pooled_to_the_side():
    small = draw_matrix(np.eye(3, dtype=np.float32), 100)
    assert small.shape == (99, 99, 3)
    assert (small[10, 10] == small[50, 50]).all()
    assert small[10, 10].sum() > small[10, 50].sum()
    assert draw_matrix(np.eye(300, dtype=np.float32), 100).shape == (100, 100, 3)


@pytest.mark.shows("SVIT-14")
def test_relations_of_svit_are_its_super_token_attention():
    model = saccade.create_model("svit_nano").eval()
    observed = observe(model, view(64, 64), (0.5,) * 3, (0.2,) * 3)
    assert [one.attention.name for one in observed.steps] == [one.trace.name for one in observed.steps]
    for one in observed.steps:
        assert token_relations(one).shape == (16, 16)
        torch.testing.assert_close(token_relations(one).sum(1), torch.ones(16))
    figure = relation_figure(observed, "svit_nano")
    assert [panel.label for panel in figure.panels] == [
        "stage 2, block 1",
        "all 16 x 16",
        "stage 2, block 2",
        "all 16 x 16",
    ]
