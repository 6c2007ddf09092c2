"""SparseFormer's figures on planted regions and points."""

import numpy as np
import pytest
import torch
from torch import nn

from saccade.explanation.drawing.colours import token_colours
from saccade.explanation.figures.sparseformer import (
    PERTURBATIONS,
    image_response_figure,
    perturb,
    perturbed_figure,
    sampling_density,
    sampling_figure,
    token_responses,
)
from tests.explanation.planted import observation, quadrants, region_trace, step, view


@pytest.mark.shows("SF-76", "SF-77")
def test_sampling_figure_draws_regions_points_and_density():
    one = step(region_trace([(0.25, 0.25), (0.75, 0.6)], 0.01), (200, 200))
    figure = sampling_figure(observation(view(200, 200, 90), one), "a_model")
    regions, points, density = (panel.image for panel in figure.panels)
    for (x, y), colour in zip([(50, 50), (150, 120)], token_colours(2), strict=True):
        assert (regions[y - 20, x] == colour).all()
        assert (regions[y, x - 20] == colour).all()
        near = points[y - 3 : y + 3, x - 3 : x + 3].reshape(-1, 3)
        assert (near == colour).all(1).any()
    brightness = density.astype(int).sum(2)
    assert brightness[50, 50] == brightness[120, 150] > brightness[10, 180] + 200
    assert "2 tokens" in figure.caption
    assert figure.panels[1].note == "4 per token, 100% inside the image"


def test_sampling_density_needs_regions():
    with pytest.raises(TypeError, match=r"expected RegionTrace, got AssignmentTrace of blocks\.0"):
        sampling_density(step(quadrants(), (8, 8)), (8, 8))


class TokenMean(nn.Module):
    """A classifier with given tokens: logits are linear in their mean."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens = nn.Parameter(tokens)

    def forward_features(self, images):
        return self.tokens.expand(len(images), -1, -1)

    def forward_head(self, tokens):
        return tokens.mean(1) @ torch.tensor([[1.0, 0.0], [0.0, 2.0]])


@pytest.mark.shows("SF-78")
def test_token_responses_are_the_logits_of_single_tokens():
    tokens = torch.tensor([[[1.0, 0.0], [0.0, 5.0], [3.0, 1.0]]])
    responses = token_responses(TokenMean(tokens), torch.zeros(2, 3, 8, 8))
    assert responses.shape == (2, 3, 2)
    assert responses[1].tolist() == [[1, 0], [0, 10], [3, 2]]


def test_token_responses_need_tokens():
    model = TokenMean(torch.zeros(1, 3, 2))
    model.forward_features = lambda images: torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"expected TokenMean to end in tokens \(B, M, D\), got \(1, 2, 3, 4\)"):
        token_responses(model, torch.zeros(1, 3, 8, 8))


@pytest.mark.shows("SF-78")
def test_response_figure_draws_the_top_tokens():
    one = step(region_trace([(0.2, 0.2), (0.5, 0.5), (0.8, 0.8)]), (100, 100))
    responses = torch.tensor([0.1, 3.0, 2.0])
    figure = image_response_figure(observation(view(100, 100, 90), one), responses, "cat", "m", top=2)
    drawn, colours = figure.panels[0].image, token_colours(3)
    assert (drawn[40, 50] == colours[1]).all()
    assert (drawn[70, 80] == colours[2]).all()
    assert (drawn[10, 20] == 90).all()
    assert "highest logits of 3 tokens: 1 (3), 2 (2)." in figure.caption
    assert figure.title == "The 2 tokens with the highest logits for cat"


@pytest.mark.shows("SF-79")
def test_erasing_blackens_a_third_of_the_image():
    planted = view(60, 90, seed=3)
    erased = perturb(planted, "erased", seed=1)
    black = (erased.canvas == 0).all(2)
    assert black.mean() == pytest.approx(1 / 3, abs=0.03)
    assert (erased.canvas[~black] == planted.canvas[~black]).all()
    assert torch.equal(erased.image, perturb(planted, "erased", seed=1).image)
    assert not torch.equal(erased.image, perturb(planted, "erased", seed=2).image)


@pytest.mark.shows("SF-79")
def test_padding_surrounds_the_image_at_half_size():
    planted = view(60, 90, seed=3)
    padded = perturb(planted, "zero padding").canvas
    assert (padded[:15] == 0).all()
    assert (padded[:, :22] == 0).all()
    assert padded[15:45, 22:67].std() > 5
    reflected = perturb(planted, "reflection padding").canvas
    assert (reflected[14] == reflected[16]).all()
    assert (reflected[15:45, 22:67] == padded[15:45, 22:67]).all()


@pytest.mark.parametrize("kind", PERTURBATIONS)
def test_perturbation_is_the_same_for_input_and_canvas(kind):
    planted = view(60, 90, seed=3)
    changed = perturb(planted, kind)
    assert changed.name == f"planted, {kind}"
    assert changed.image.shape == planted.image.shape
    assert changed.canvas.shape == planted.canvas.shape
    assert np.abs(changed.image.permute(1, 2, 0).numpy() * 255 - changed.canvas).max() < 1.01


def test_unknown_perturbation_is_refused():
    with pytest.raises(ValueError, match="expected one of erased, zero padding, reflection padding, got 'noise'"):
        perturb(view(8, 8), "noise")


@pytest.mark.shows("SF-79")
def test_perturbed_figure_has_a_row_per_image():
    one = step(region_trace([(0.25, 0.25)], 0.01), (40, 40))
    erased = view(40, 40, 0)._replace(name="erased")
    figure = perturbed_figure([observation(view(40, 40, 90), one, one), observation(erased, one, one)], "a_model")
    assert figure.columns == 3
    assert [panel.label for panel in figure.panels[::3]] == ["planted", "erased"]
    brightness = figure.panels[1].image.astype(int).sum(2)
    assert brightness[10, 10] > brightness[30, 30] + 200
