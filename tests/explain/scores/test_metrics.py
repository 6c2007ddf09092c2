"""The numbers, against values known by hand."""

import math

import numpy as np
import pytest
import torch

from saccade.explain.scores.curves import Curve, blur, deletion, insertion
from saccade.explain.scores.overlap import doubt, redundancy, width
from saccade.explain.scores.pointing import inside_boxes, point
from saccade.explain.scores.superpixels import IGNORE, boundary_recall, compactness, grid, judge, pieces, slic

HALVES = np.repeat([[0] * 8 + [1] * 8], 16, axis=0)  # left and right


def test_a_perfect_segmentation():
    found = judge(HALVES + 5, HALVES)
    assert found.segments == found.pieces == 2
    assert found.accuracy == found.recall == 1
    assert found.undersegmentation == 0


def test_one_segment_for_everything():
    found = judge(np.zeros_like(HALVES), HALVES)
    assert found.accuracy == 0.5
    assert found.recall == 0
    assert found.undersegmentation == 1  # each half leaks as much as it holds
    assert found.compactness == pytest.approx(math.pi / 4)


def test_a_line_that_is_off_by_three():
    moved = np.repeat([[0] * 5 + [1] * 11], 16, axis=0)
    found = judge(moved, HALVES)
    assert found.accuracy == 13 / 16
    assert found.undersegmentation == pytest.approx(2 * 3 / 16)
    assert boundary_recall(moved, HALVES, reach=2.9) == 0
    assert boundary_recall(moved, HALVES, reach=3) == 1


def test_unknown_pixels_count_nowhere():
    truth = HALVES.copy()
    truth[:, 8:] = IGNORE
    found = judge(np.zeros_like(truth), truth)
    assert found.accuracy == 1
    assert found.undersegmentation == 0
    assert found.recall == 1  # the edge of the unknown is no border
    with pytest.raises(ValueError, match="no known pixel"):
        judge(HALVES, np.full_like(HALVES, IGNORE))
    with pytest.raises(ValueError, match="draw the labels at its size"):
        judge(HALVES[:8], HALVES)


def test_pieces_and_compactness():
    board = np.indices((8, 8)).sum(0) % 2
    assert len(np.unique(pieces(board))) == 64
    assert compactness(board) == pytest.approx(math.pi / 4)  # single pixels are squares
    assert compactness(HALVES) == pytest.approx(4 * math.pi * 128 / 48**2)


def test_the_rivals_have_as_many_segments():
    assert len(np.unique(grid((60, 80), 12))) == 12
    assert np.bincount(grid((60, 80), 12).ravel()).tolist() == [400] * 12
    assert len(np.unique(grid((5, 5), 1))) == 1
    random = np.random.default_rng(0)
    picture = np.kron(random.integers(0, 255, (6, 8, 3)), np.ones((10, 10, 1))).astype(np.uint8)
    assert abs(len(np.unique(slic(picture, 48))) - 48) <= 4
    assert judge(slic(picture, 48), np.kron(np.arange(48).reshape(6, 8), np.ones((10, 10), int))).accuracy > 0.9


def test_pointing():
    values = np.zeros((10, 20))
    values[2, 3], values[8, 15] = 3, 1
    boxes = np.array([[2.0, 1, 6, 5], [2, 1, 6, 5]])  # the same box twice counts once
    found = point(values, boxes)
    assert found == (True, 0.75, 16 / 200)
    assert point(values, np.array([[10.0, 0, 20, 10]])) == (False, 0.25, 0.5)
    assert point(np.zeros((4, 4)), np.array([[0, 0, 2, 2]])).energy == 0.25  # an empty map is an even one
    assert inside_boxes((3, 3), np.array([[0.5, 0.5, 2.5, 1.5]])).astype(int).tolist() == [
        [1, 1, 0],
        [0, 0, 0],
        [0, 0, 0],
    ]


def test_deletion_falls_and_insertion_rises_where_it_matters():
    """The class is seen in one corner: a map that knows it is deleted first and inserted first."""
    image = torch.zeros(3, 32, 32)
    image[:, :4, :4] = 1
    good = torch.zeros(32, 32)
    good[:4, :4] = 1

    def classify(pictures):
        return pictures[:, :, :4, :4].mean((1, 2, 3))

    gone, back = deletion(image, good, classify), deletion(image, -good, classify)
    assert gone.share.tolist() == [i / 16 for i in range(17)]
    assert gone.probability[0] == 1
    assert gone.probability[1] == pytest.approx(1 / 64, abs=1e-6)  # the picture's mean colour is left
    assert back.probability[15] == 1
    assert gone.area < 0.1 < 0.9 < back.area
    come, late = insertion(image, good, classify), insertion(image, -good, classify)
    assert come.probability[1] == 1
    assert late.probability[15] == late.probability[0] < 0.7  # blurred until the very end
    assert come.area > late.area + 0.25


def test_the_area_of_a_curve():
    assert Curve(np.array([0, 0.5, 1]), np.array([1.0, 1.0, 0.0])).area == 0.75


def test_blur_keeps_the_mean_of_a_flat_picture():
    assert blur(torch.full((3, 20, 30), 0.3)).sub(0.3).abs().max() < 1e-6
    assert blur(torch.rand(3, 20, 30)).std() < 0.1
    assert blur(torch.rand(3, 1, 1)).shape == (3, 1, 1)


def test_redundancy():
    apart = torch.eye(4).reshape(4, 2, 2)
    assert redundancy(apart) == 0
    assert redundancy(torch.ones(5, 3, 3)) == pytest.approx(1)
    assert redundancy(torch.tensor([[[1.0, 1, 0]], [[0, 1, 1]], [[0, 0, 0]]])) == pytest.approx(0.5)  # the empty is out
    assert redundancy(torch.ones(1, 2, 2)) == 0


def test_entropies():
    apart, even = torch.eye(4).reshape(4, 2, 2), torch.ones(4, 2, 2)
    assert width(apart) == doubt(apart) == 0
    assert width(even) == doubt(even) == pytest.approx(1)
    half = torch.tensor([[[1.0, 1], [0, 0]], [[0, 0], [1, 1]]])
    assert width(half) == pytest.approx(0.5)
    assert doubt(half) == 0
    assert doubt(torch.zeros(3, 2, 2)) == 0
