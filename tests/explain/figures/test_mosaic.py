"""Painting, by pixel values."""

import numpy as np
import pytest
import torch

from saccade.explain.drawing.colours import token_colours
from saccade.explain.drawing.overlay import (
    blend,
    border_mask,
    borders,
    boxes,
    dots,
    heat,
    masked,
    spotlight,
    tint,
    to_grey,
)
from saccade.explain.figures.mosaic import FAINT, STRONG, mosaic, paint, strongest
from saccade.tokens.trace import AssignmentTrace
from tests.explain.planted import association, looking_at, quadrants, seen, step, view


def test_quadrant_tokens_own_their_quadrants():
    labels, lead = strongest(step(quadrants(4), (32, 32)), (32, 32))
    expected = np.kron(np.array([[0, 1], [2, 3]]), np.ones((16, 16), int))
    inside = ~border_mask(expected, 4)
    assert (labels == expected)[inside].all()
    assert lead[inside].min() == 1
    assert lead[15:17, 4].max() < 1  # between two cells both count


def test_a_pixel_has_the_colour_of_its_token_as_strong_as_it_leads():
    picture = view(32, 32, 200).picture
    labels = np.kron(np.array([[0, 1], [2, 3]]), np.ones((16, 16), int))
    lead = np.ones((32, 32))
    lead[:, :8] = 0
    painted = paint(picture, labels, lead)
    ground = 40 + 200 * 215 / 255
    for row, column, token, alpha in [(3, 3, 0, FAINT), (3, 11, 0, STRONG), (3, 25, 1, STRONG), (28, 28, 3, STRONG)]:
        expected = np.round(ground) * (1 - alpha) + token_colours(4)[token] * alpha
        assert np.abs(painted[row, column] - expected).max() <= 1
    assert (painted[15, 4] == 255).all()  # the line between tokens 0 and 2


def test_pixels_nobody_sees_stay_grey():
    trace = looking_at([(0.25, 0.25)], 0.02)
    labels, _ = strongest(step(trace, (64, 64)), (64, 64))
    assert labels[16, 16] == 0
    assert labels[50, 50] == -1
    picture = view(64, 64).picture
    painted = paint(picture, labels, np.ones((64, 64)))
    assert (painted[50:, 50:] == to_grey(picture)[50:, 50:]).all()


def test_the_numbers_of_colours_are_used():
    labels = np.zeros((8, 8), int)
    painted = paint(view(8, 8, 0).picture, labels, np.ones((8, 8)), np.array([5]))
    expected = 40 * (1 - STRONG) + token_colours(6)[5] * STRONG
    assert np.abs(painted[4, 4] - expected).max() <= 1


def test_many_tokens_are_compared_in_parts():
    maps = torch.rand(1, 150, 6, 6)
    labels, _ = strongest(step(AssignmentTrace(maps.flatten(2), (6, 6)), (6, 6)), (6, 6))
    assert (labels == maps[0].argmax(0).numpy()).all()


def test_thousands_of_super_tokens_are_compared_without_their_maps(monkeypatch):
    truth = torch.arange(16)[:, None] // 4 * 4 + torch.arange(16)[None] // 4
    truth[4:8, 2:4] = 5  # a piece of the cell to the left
    one = step(association(truth, 4), (16, 16))
    monkeypatch.setattr("saccade.explain.figures.mosaic.MANY", 1)
    labels, lead = strongest(one, (32, 32))
    assert (labels == np.kron(truth.numpy(), np.ones((2, 2), int))).all()
    assert lead.min() == 1


def test_super_tokens_of_an_odd_map():
    truth = torch.arange(13)[:, None] // 4 * 3 + torch.arange(10)[None] // 4
    truth[0:4, 4:6] = 0  # the first token takes a piece of its neighbour's cell
    labels, lead = strongest(step(association(truth, 4), (13, 10)), (13, 10))
    assert (labels == truth.numpy()).all()
    assert lead.min() == 1


def test_the_mosaic_figure_names_model_stage_and_count():
    figure = mosaic(seen(view(32, 32), step(quadrants(4), (32, 32))), "a_model")
    assert "a_model" in figure.caption
    assert figure.panels[1].label == "block 1"
    assert figure.panels[1].note == "4 tokens, 4 lead somewhere"
    assert figure.panels[0].picture.shape == figure.panels[1].picture.shape


def test_heat_is_blue_at_the_lowest_and_red_at_the_highest():
    values = np.linspace(3, 5, 64).reshape(8, 8)
    drawn = heat(view(8, 8, 0).picture, values, alpha=1.0)
    assert drawn[0, 0].tolist() == [0x31, 0x36, 0x95]
    assert drawn[7, 7].tolist() == [0xA5, 0x00, 0x26]
    assert (heat(view(8, 8, 0).picture, np.ones((8, 8)), alpha=1.0) == drawn[0, 0]).all()  # constant: no signal


def test_spotlight_tint_mask_and_blend():
    picture = view(4, 4).picture
    values = np.zeros((4, 4))
    values[1, 2] = 7.0
    lit = spotlight(picture, values, dark=0.5)
    assert (lit[1, 2] == picture[1, 2]).all()
    assert np.abs(lit[0, 0] - to_grey(picture)[0, 0] * 0.5).max() <= 1
    assert tint(picture, values, (255, 0, 0), alpha=1.0)[1, 2].tolist() == [255, 0, 0]
    assert (tint(picture, values, (255, 0, 0))[0, 0] == to_grey(picture)[0, 0]).all()
    mask = values > 0
    assert (masked(picture, mask)[1, 2] == picture[1, 2]).all()
    assert masked(picture, mask).sum() == picture[1, 2].sum()
    assert (blend(picture, np.zeros(3), 0.0) == picture).all()


def test_boxes_and_dots_are_where_they_should_be():
    picture = view(40, 80, 10).picture
    drawn = boxes(picture, np.array([[0.25, 0.25, 0.75, 0.75]]), np.array([[255, 0, 0]]), width=1)
    red = (drawn == [255, 0, 0]).all(2)
    assert red[10, 20]
    assert red[29, 59]
    assert red.sum() == 2 * (20 + 40) - 4
    assert (boxes(picture, np.array([[-5.0, -5, 9, 9]]), np.array([[255, 0, 0]])) == picture).all()  # out of sight
    drawn = dots(picture, np.array([[[0.5, 0.25]]]), np.array([[0, 255, 0]]), radius=1.5)
    rows, columns = np.where((drawn == [0, 255, 0]).all(2))
    assert abs(rows.mean() - 9.5) <= 0.5
    assert abs(columns.mean() - 39.5) <= 0.5


def test_lines_fade_where_labels_crumble():
    picture = view(16, 16).picture
    board = np.indices((16, 16)).sum(0) % 2
    assert (borders(picture, board) == picture).all()
    halves = np.repeat([[0] * 8 + [1] * 8], 16, axis=0)
    assert (borders(picture, halves)[:, 7:9] == 255).all()


@pytest.mark.parametrize("thickness", [1, 2])
def test_borders_lie_on_both_sides_of_a_line(thickness):
    labels = np.zeros((6, 8), int)
    labels[:, 4:] = 1
    edge = border_mask(labels, thickness)
    assert np.where(edge[0])[0].tolist() == list(range(4 - thickness, 4 + thickness))
