"""Superpixel metrics, against values computed by hand."""

import math

import numpy as np
import pytest

from saccade.explanation.scores.superpixels import (
    IGNORE,
    boundary_recall,
    compactness,
    connected_components,
    evaluate_segments,
    grid_segments,
    slic_segments,
)

COLUMNS = np.repeat([[0] * 8 + [1] * 8], 16, axis=0)  # left and right


def test_metrics_of_a_perfect_segmentation():
    metrics = evaluate_segments(COLUMNS + 5, COLUMNS)
    assert metrics.segments == metrics.components == 2
    assert metrics.accuracy == metrics.recall == 1
    assert metrics.undersegmentation == 0


def test_metrics_of_a_single_segment():
    metrics = evaluate_segments(np.zeros_like(COLUMNS), COLUMNS)
    assert metrics.accuracy == 0.5
    assert metrics.recall == 0
    assert metrics.undersegmentation == 1  # each half leaks its own size
    assert metrics.compactness == pytest.approx(math.pi / 4)


def test_metrics_of_a_border_off_by_three_pixels():
    shifted = np.repeat([[0] * 5 + [1] * 11], 16, axis=0)
    metrics = evaluate_segments(shifted, COLUMNS)
    assert metrics.accuracy == 13 / 16
    assert metrics.undersegmentation == pytest.approx(2 * 3 / 16)
    assert boundary_recall(shifted, COLUMNS, max_distance=2.9) == 0
    assert boundary_recall(shifted, COLUMNS, max_distance=3) == 1


def test_unlabelled_pixels_are_ignored():
    truth = COLUMNS.copy()
    truth[:, 8:] = IGNORE
    metrics = evaluate_segments(np.zeros_like(truth), truth)
    assert metrics.accuracy == 1
    assert metrics.undersegmentation == 0
    assert metrics.recall == 1  # the edge of the unlabelled area is not a border


def test_metrics_refuse_other_shapes_and_unlabelled_truth():
    with pytest.raises(ValueError, match="expected ground truth with labelled pixels"):
        evaluate_segments(COLUMNS, np.full_like(COLUMNS, IGNORE))
    with pytest.raises(ValueError, match=r"ground truth's shape \(16, 16\), got \(8, 16\)"):
        evaluate_segments(COLUMNS[:8], COLUMNS)


def test_compactness_is_the_mean_over_components():
    board = np.indices((8, 8)).sum(0) % 2
    assert len(np.unique(connected_components(board))) == 64
    assert compactness(board) == pytest.approx(math.pi / 4)  # single pixels are squares
    assert compactness(COLUMNS) == pytest.approx(4 * math.pi * 128 / 48**2)


def test_grid_segments_are_equal_cells():
    assert np.bincount(grid_segments((60, 80), 12).ravel()).tolist() == [400] * 12
    assert (grid_segments((5, 5), 1) == 0).all()


def test_slic_segments_are_close_to_the_requested_number():
    colours = np.random.default_rng(0).integers(0, 255, (6, 8, 3))
    image = np.kron(colours, np.ones((10, 10, 1))).astype(np.uint8)
    truth = np.kron(np.arange(48).reshape(6, 8), np.ones((10, 10), int))
    labels = slic_segments(image, 48)
    assert abs(len(np.unique(labels)) - 48) <= 4
    assert evaluate_segments(labels, truth).accuracy > 0.9
