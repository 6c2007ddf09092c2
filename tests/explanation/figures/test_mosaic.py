"""The mosaic, by pixel values."""

import numpy as np
import torch

from saccade.explanation.drawing.colours import token_colours
from saccade.explanation.drawing.overlay import border_mask, to_grey
from saccade.explanation.figures.mosaic import MAX_ALPHA, MIN_ALPHA, mosaic_figure, paint_mosaic, strongest_tokens
from saccade.tokens.trace import AssignmentTrace
from tests.explanation.planted import association, observation, quadrants, region_trace, step, view


def test_strongest_tokens_of_quadrants_are_their_quadrants():
    labels, dominance = strongest_tokens(step(quadrants(4), (32, 32)), (32, 32))
    expected = np.kron(np.array([[0, 1], [2, 3]]), np.ones((16, 16), int))
    inside = ~border_mask(expected, 4)
    assert (labels == expected)[inside].all()
    assert dominance[inside].min() == 1
    assert dominance[15:17, 4].max() < 1  # interpolated between two cells


def test_dominance_is_zero_where_all_tokens_are_equal():
    trace = AssignmentTrace(torch.full((1, 3, 16), 1 / 16), (4, 4))
    labels, dominance = strongest_tokens(step(trace, (4, 4)), (4, 4))
    assert (labels == 0).all()
    assert np.abs(dominance).max() < 1e-6


def test_mosaic_colour_is_blended_by_dominance():
    image = view(32, 32, 200).canvas
    labels = np.kron(np.array([[0, 1], [2, 3]]), np.ones((16, 16), int))
    dominance = np.ones((32, 32))
    dominance[:, :8] = 0
    painted = paint_mosaic(image, labels, dominance)
    grey = 40 + 200 * 215 / 255
    cases = [(3, 3, 0, MIN_ALPHA), (3, 11, 0, MAX_ALPHA), (3, 25, 1, MAX_ALPHA), (28, 28, 3, MAX_ALPHA)]
    for row, column, token, alpha in cases:
        expected = np.round(grey) * (1 - alpha) + token_colours(4)[token] * alpha
        assert np.abs(painted[row, column] - expected).max() <= 1
    assert (painted[15, 4] == 255).all()  # the line between tokens 0 and 2


def test_pixels_without_a_token_stay_grey():
    labels, _ = strongest_tokens(step(region_trace([(0.25, 0.25)], 0.02), (64, 64)), (64, 64))
    assert labels[16, 16] == 0
    assert labels[50, 50] == -1
    image = view(64, 64).canvas
    painted = paint_mosaic(image, labels, np.ones((64, 64)))
    assert (painted[50:, 50:] == to_grey(image)[50:, 50:]).all()


def test_mosaic_uses_the_colour_indices():
    painted = paint_mosaic(view(8, 8, 0).canvas, np.zeros((8, 8), int), np.ones((8, 8)), np.array([5]))
    expected = 40 * (1 - MAX_ALPHA) + token_colours(6)[5] * MAX_ALPHA
    assert np.abs(painted[4, 4] - expected).max() <= 1


def test_strongest_tokens_are_compared_across_chunks():
    maps = torch.rand(1, 150, 6, 6)
    labels, _ = strongest_tokens(step(AssignmentTrace(maps.flatten(2), (6, 6)), (6, 6)), (6, 6))
    assert (labels == maps[0].argmax(0).numpy()).all()


def test_strongest_of_many_super_tokens_is_computed_per_cell(monkeypatch):
    truth = torch.arange(16)[:, None] // 4 * 4 + torch.arange(16)[None] // 4
    truth[4:8, 2:4] = 5  # part of the cell to the left
    one = step(association(truth, 4), (16, 16))
    monkeypatch.setattr("saccade.explanation.figures.mosaic.MAX_SMOOTH", 1)
    labels, dominance = strongest_tokens(one, (32, 32))
    assert (labels == np.kron(truth.numpy(), np.ones((2, 2), int))).all()
    assert dominance.min() == 1


def test_strongest_super_tokens_of_an_odd_map():
    truth = torch.arange(13)[:, None] // 4 * 3 + torch.arange(10)[None] // 4
    truth[0:4, 4:6] = 0  # the first token takes part of its neighbour's cell
    labels, dominance = strongest_tokens(step(association(truth, 4), (13, 10)), (13, 10))
    assert (labels == truth.numpy()).all()
    assert dominance.min() == 1


def test_mosaic_figure_names_model_step_and_count():
    figure = mosaic_figure(observation(view(32, 32), step(quadrants(4), (32, 32))), "a_model")
    assert figure.caption.startswith("a_model. ")
    assert [panel.label for panel in figure.panels] == ["planted", "block 1"]
    assert figure.panels[1].note == "4 tokens, 4 strongest somewhere"
    assert figure.panels[0].image.shape == figure.panels[1].image.shape == (32, 32, 3)
