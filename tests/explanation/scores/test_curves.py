"""Deletion and insertion curves."""

import numpy as np
import pytest
import torch

from saccade.explanation.scores.curves import Curve, blur, deletion, insertion

IMAGE, MAP = torch.zeros(3, 32, 32), torch.zeros(32, 32)
IMAGE[:, :4, :4] = 1
MAP[:4, :4] = 1


def classify(images: torch.Tensor) -> torch.Tensor:
    """The class depends on the top left corner only."""
    return images[:, :, :4, :4].mean((1, 2, 3))


def test_deletion_falls_early_for_a_faithful_map():
    faithful, inverted = deletion(IMAGE, MAP, classify), deletion(IMAGE, -MAP, classify)
    assert faithful.fraction.tolist() == [i / 16 for i in range(17)]
    assert faithful.probability[0] == 1
    assert faithful.probability[1] == pytest.approx(1 / 64, abs=1e-6)  # the image's mean colour
    assert inverted.probability[15] == 1
    assert faithful.area < 0.1 < 0.9 < inverted.area


def test_insertion_rises_early_for_a_faithful_map():
    faithful, inverted = insertion(IMAGE, MAP, classify), insertion(IMAGE, -MAP, classify)
    assert faithful.probability[1] == 1
    assert inverted.probability[15] == inverted.probability[0] < 0.7  # blurred until the last step
    assert faithful.area > inverted.area + 0.25


def test_area_is_trapezoidal():
    assert Curve(np.array([0, 0.5, 1]), np.array([1.0, 1.0, 0.0])).area == 0.75


def test_blur_preserves_a_constant_image():
    torch.manual_seed(0)
    assert blur(torch.full((3, 20, 30), 0.3)).sub(0.3).abs().max() < 1e-6
    assert blur(torch.rand(3, 20, 30)).std() < 0.1
    assert blur(torch.rand(3, 1, 1)).shape == (3, 1, 1)
