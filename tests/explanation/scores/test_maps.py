"""Metrics of token maps, against values computed by hand."""

import numpy as np
import pytest
import torch

from saccade.explanation.scores.maps import inside_boxes, pixel_entropy, pointing_game, redundancy, token_entropy

DISJOINT, UNIFORM = torch.eye(4).reshape(4, 2, 2), torch.ones(4, 2, 2)


def test_redundancy_is_the_shared_mass_of_pairs():
    assert redundancy(DISJOINT) == 0
    assert redundancy(torch.ones(5, 3, 3)) == pytest.approx(1)
    assert redundancy(torch.tensor([[[1.0, 1, 0]], [[0, 1, 1]], [[0, 0, 0]]])) == pytest.approx(0.5)  # empty: ignored
    assert redundancy(torch.ones(1, 2, 2)) == 0


def test_entropies_are_relative_to_their_maximum():
    assert token_entropy(DISJOINT) == pixel_entropy(DISJOINT) == 0
    assert token_entropy(UNIFORM) == pixel_entropy(UNIFORM) == pytest.approx(1)
    bands = torch.tensor([[[1.0, 1], [0, 0]], [[0, 0], [1, 1]]])
    assert token_entropy(bands) == pytest.approx(0.5)
    assert pixel_entropy(bands) == 0
    assert pixel_entropy(torch.zeros(3, 2, 2)) == 0


def test_pointing_game_counts_overlapping_boxes_once():
    values = np.zeros((10, 20))
    values[2, 3], values[8, 15] = 3, 1
    assert pointing_game(values, np.array([[2.0, 1, 6, 5], [2, 1, 6, 5]])) == (True, 0.75, 16 / 200)
    assert pointing_game(values, np.array([[10.0, 0, 20, 10]])) == (False, 0.25, 0.5)


def test_pointing_game_treats_an_empty_map_as_uniform():
    assert pointing_game(np.zeros((4, 4)), np.array([[0, 0, 2, 2]])).energy == 0.25


def test_inside_boxes_tests_pixel_centres():
    expected = [[1, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert inside_boxes((3, 3), np.array([[0.5, 0.5, 2.5, 1.5]])).astype(int).tolist() == expected
