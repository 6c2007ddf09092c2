"""The gallery of single tokens."""

import numpy as np

from saccade.explanation.drawing.colours import token_colour
from saccade.explanation.figures.gallery import gallery_figure, rank_tokens
from tests.explanation.planted import observation, quadrants, region_trace, step, view


def test_rank_prefers_occlusion_over_gradient():
    gradient, occlusion = np.array([1.0, 2.0, 3.0]), np.array([5.0, -1.0, 5.0])
    assert rank_tokens({"gradient": gradient, "occlusion": occlusion}, 3).tolist() == [0, 2, 1]
    assert rank_tokens({"gradient": gradient}, 3).tolist() == [2, 1, 0]
    assert rank_tokens({}, 3).tolist() == [0, 1, 2]


def test_gallery_lights_each_token_and_notes_its_importance():
    one = step(quadrants(4), (32, 32))
    planted = view(32, 32)
    importance = {"gradient": np.array([0.0, 3.0, 1.0, 2.0])}
    figure = gallery_figure(observation(planted, one), one, importance, "cat", "a_model", max_tokens=2)
    assert [panel.label for panel in figure.panels] == ["token 1", "token 3"]
    assert [panel.note for panel in figure.panels] == ["gradient +3", "gradient +2"]
    assert [panel.colour for panel in figure.panels] == [token_colour(1), token_colour(3)]
    assert (figure.panels[0].image[4, 28] == planted.canvas[4, 28]).all()  # top right, fully lit
    assert (figure.panels[0].image[28, 4] != planted.canvas[28, 4]).any()
    assert "a_model, block 1. 2 of 4 tokens, by importance for cat. Gradient:" in figure.caption


def test_gallery_draws_the_region_of_a_token():
    one = step(region_trace([(0.5, 0.5)]), (100, 100))
    figure = gallery_figure(observation(view(100, 100, 0), one), one, {}, "cat", "a_model")
    assert tuple(figure.panels[0].image[40, 50]) == token_colour(0)
    assert figure.caption == "a_model, step 1 of 1. All 1 tokens. "
