"""SparseFormer's figures on planted regions and points."""

import numpy as np
import pytest
import torch
from torch import nn

from saccade.explain.drawing.colours import token_colours
from saccade.explain.figures.sparseformer import (
    DISTURBANCES,
    disturb,
    disturbed_figure,
    looking_figure,
    responding_figure,
    token_responses,
)
from tests.explain.planted import looking_at, seen, step, view


def test_regions_points_and_density_are_drawn_where_they_are():
    one = step(looking_at([(0.25, 0.25), (0.75, 0.6)], 0.01), (200, 200))
    figure = looking_figure(seen(view(200, 200, 90), one), "a_model")
    regions, points, looks = (panel.picture for panel in figure.panels)
    colours = token_colours(2)
    for (x, y), colour in zip([(50, 50), (150, 120)], colours, strict=True):
        assert (regions[y - 20, x] == colour).all()
        assert (regions[y, x - 20] == colour).all()
        near = points[y - 3 : y + 3, x - 3 : x + 3].reshape(-1, 3)
        assert (near == colour).all(1).any()
    bright = looks.astype(int).sum(2)
    assert bright[50, 50] == bright[120, 150] > bright[10, 180] + 200
    assert "2 tokens" in figure.caption
    assert figure.panels[1].note == "4 a token, 100% inside"


class Answering(nn.Module):
    """Tokens are given; the class of a set of tokens is read off their mean."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens = nn.Parameter(tokens)

    def forward_features(self, images):
        return self.tokens.expand(len(images), -1, -1)

    def forward_head(self, tokens):
        return tokens.mean(1) @ torch.tensor([[1.0, 0.0], [0.0, 2.0]])


def test_the_classifier_is_put_on_single_tokens():
    tokens = torch.tensor([[[1.0, 0.0], [0.0, 5.0], [3.0, 1.0]]])
    responses = token_responses(Answering(tokens), torch.zeros(2, 3, 8, 8))
    assert responses.shape == (2, 3, 2)
    assert responses[1].tolist() == [[1, 0], [0, 10], [3, 2]]
    model = Answering(tokens)
    model.forward_features = lambda images: torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="not in tokens"):
        token_responses(model, torch.zeros(1, 3, 8, 8))


def test_the_tokens_that_respond_most_are_drawn():
    one = step(looking_at([(0.2, 0.2), (0.5, 0.5), (0.8, 0.8)]), (100, 100))
    figure = responding_figure(seen(view(100, 100, 90), one), torch.tensor([0.1, 3.0, 2.0]), "cat", "m", top=2)
    drawn = figure.panels[0].picture
    colours = token_colours(3)
    assert (drawn[40, 50] == colours[1]).all()
    assert (drawn[70, 80] == colours[2]).all()
    assert (drawn[10, 20] == 90).all()
    assert "1 (3), 2 (2)" in figure.caption


def test_disturbances():
    planted = view(60, 90, seed=3)._replace(name="p")
    erased = disturb(planted, "erased", seed=1)
    gone = (erased.picture == 0).all(2)
    assert gone.mean() == pytest.approx(1 / 3, abs=0.03)
    assert (erased.picture[~gone] == planted.picture[~gone]).all()
    assert torch.equal(erased.image, disturb(planted, "erased", seed=1).image)
    padded = disturb(planted, "zero padding")
    assert (padded.picture[:15] == 0).all()
    assert (padded.picture[:, :22] == 0).all()
    assert padded.picture[15:45, 22:67].std() > 5
    mirrored = disturb(planted, "reflection").picture
    assert (mirrored[14] == mirrored[16]).all()
    assert (mirrored[15:45, 22:67] == padded.picture[15:45, 22:67]).all()
    for kind in DISTURBANCES:
        changed = disturb(planted, kind)
        assert changed.image.shape == planted.image.shape
        assert changed.picture.shape == planted.picture.shape
        assert np.abs(changed.image.permute(1, 2, 0).numpy() * 255 - changed.picture).max() < 1.01


def test_a_row_for_every_disturbed_picture():
    one = step(looking_at([(0.25, 0.25)], 0.01), (40, 40))
    rows = [seen(view(40, 40, 90), one, one), seen(view(40, 40, 0)._replace(name="erased"), one, one)]
    figure = disturbed_figure(rows, "a_model")
    assert figure.columns == 3
    assert [panel.label for panel in figure.panels[::3]] == ["planted", "erased"]
    bright = figure.panels[1].picture.astype(int).sum(2)
    assert bright[10, 10] > bright[30, 30] + 200
