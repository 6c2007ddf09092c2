"""Overlays, by pixel values."""

import numpy as np
import pytest

from saccade.explanation.drawing.overlay import (
    apply_mask,
    blend,
    border_mask,
    downscale,
    draw_borders,
    draw_boxes,
    draw_heat,
    draw_points,
    rescale,
    spotlight,
    tint,
    to_grey,
)
from tests.explanation.planted import view

RED, GREEN = np.array([[255, 0, 0]]), np.array([[0, 255, 0]])


@pytest.mark.shows("VT-74")
def test_heat_is_blue_at_the_minimum_and_red_at_the_maximum():
    values = np.linspace(3, 5, 64).reshape(8, 8)
    drawn = draw_heat(view(8, 8, 0).canvas, values, alpha=1.0)
    assert drawn[0, 0].tolist() == [0x31, 0x36, 0x95]
    assert drawn[7, 7].tolist() == [0xA5, 0x00, 0x26]
    assert (draw_heat(view(8, 8, 0).canvas, np.ones((8, 8)), alpha=1.0) == drawn[0, 0]).all()  # constant: the minimum


def test_rescale_maps_to_the_unit_interval():
    values = np.array([2.0, 3.0, 4.0])
    assert rescale(values).tolist() == [0, 0.5, 1]
    assert rescale(values, from_zero=True).tolist() == [0.5, 0.75, 1]
    assert rescale(np.full(2, 7.0)).tolist() == [0, 0]


def test_downscale_keeps_the_aspect_ratio_and_never_enlarges():
    assert downscale(np.zeros((30, 60, 3), np.uint8), 20).shape == (10, 20, 3)
    small = np.zeros((5, 10, 3), np.uint8)
    assert downscale(small, 20) is small


def test_spotlight_is_full_colour_at_the_maximum():
    image = view(4, 4).canvas
    values = np.zeros((4, 4))
    values[1, 2], values[3, 3] = 7.0, 3.5
    lit = spotlight(image, values, dark=0.5)
    assert (lit[1, 2] == image[1, 2]).all()
    half = to_grey(image)[3, 3] * 0.5 * (1 - 0.5**0.7) + image[3, 3] * 0.5**0.7
    assert np.abs(lit[3, 3] - half).max() <= 0.5
    assert np.abs(lit[0, 0] - to_grey(image)[0, 0] * 0.5).max() <= 1


def test_tint_is_proportional_to_the_map():
    image = view(4, 4).canvas
    values = np.zeros((4, 4))
    values[1, 2], values[2, 2] = 1.0, 0.5
    tinted = tint(image, values, (255, 0, 0), alpha=1.0)
    assert tinted[1, 2].tolist() == [255, 0, 0]
    assert np.abs(tinted[2, 2] - (to_grey(image)[2, 2] + RED[0]) / 2).max() <= 0.5
    assert (tinted[0, 0] == to_grey(image)[0, 0]).all()


def test_mask_blackens_and_zero_alpha_changes_nothing():
    image = view(4, 4).canvas
    mask = np.zeros((4, 4), bool)
    mask[1, 2] = True
    assert (apply_mask(image, mask)[1, 2] == image[1, 2]).all()
    assert apply_mask(image, mask).sum() == image[1, 2].sum()
    assert (blend(image, np.zeros(3), 0.0) == image).all()


def test_boxes_are_drawn_at_their_coordinates():
    image = view(40, 80, 10).canvas
    drawn = draw_boxes(image, np.array([[0.25, 0.25, 0.75, 0.75]]), RED, width=1)
    red = (drawn == [255, 0, 0]).all(2)
    assert red[10, 20]
    assert red[29, 59]
    assert red.sum() == 2 * (20 + 40) - 4
    assert (draw_boxes(image, np.array([[-5.0, -5, 9, 9]]), RED) == image).all()  # outside the image
    outlined = draw_boxes(image, np.array([[0.25, 0.25, 0.75, 0.75]]), RED, width=1, outline=True)
    assert (outlined[8, 40] == 0).all()  # dark rim, two pixels outside
    assert (outlined[10, 40] == RED).all()


def test_points_are_drawn_at_their_coordinates():
    drawn = draw_points(view(40, 80, 10).canvas, np.array([[[0.5, 0.25]]]), GREEN, radius=1.5)
    rows, columns = np.where((drawn == [0, 255, 0]).all(2))
    assert abs(rows.mean() - 9.5) <= 0.5
    assert abs(columns.mean() - 39.5) <= 0.5


def test_borders_fade_for_fragmented_labels():
    image = view(16, 16).canvas
    board = np.indices((16, 16)).sum(0) % 2
    assert (draw_borders(image, board) == image).all()
    split = np.repeat([[0] * 8 + [1] * 8], 16, axis=0)
    assert (draw_borders(image, split)[:, 7:9] == 255).all()


@pytest.mark.parametrize("thickness", [1, 2])
def test_border_mask_covers_both_sides_of_a_boundary(thickness):
    labels = np.zeros((6, 8), int)
    labels[:, 4:] = 1
    for edge in (border_mask(labels, thickness)[0], border_mask(labels.T, thickness)[:, 0]):
        assert np.where(edge)[0].tolist() == list(range(4 - thickness, 4 + thickness))
