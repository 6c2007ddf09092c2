"""Top-hat density: exact, with a known peak."""

import math

import pytest
import torch

from saccade.explain.density import top_hat
from saccade.explain.sparseformer import density
from tests.explain.planted import looking_at, step


@pytest.mark.parametrize("size", [(28, 28), (17, 40), (64, 33)])
def test_it_is_the_density_of_the_trace(size):
    torch.manual_seed(0)
    trace = looking_at([(0.5, 0.5)] * 5)
    trace = trace._replace(points=torch.rand(1, 5, 9, 2) * 1.4 - 0.2, size=size)  # some outside the image
    ours = top_hat(trace.points[0], size, bandwidth=0.11)
    theirs = trace.maps(bandwidth=0.11)[0]
    assert (ours - theirs).abs().max() < 1e-6


def test_the_peak_is_where_the_points_are():
    values = density(step(looking_at([(0.3, 0.7), (0.3, 0.7), (0.8, 0.2)], 0.005), (100, 100)), (100, 100))
    assert values[69:71, 29:31].min() == pytest.approx(2 / 3)
    assert values[19:21, 79:81].min() == pytest.approx(1 / 3)
    assert values[50, 50] == 0


def test_a_point_is_a_disc():
    values = top_hat(torch.tensor([[0.5, 0.5]]), (400, 400), bandwidth=0.2)
    assert values.sum().item() / 400**2 == pytest.approx(math.pi * 0.04, rel=5e-3)


def test_points_far_outside_leave_nothing():
    assert top_hat(torch.tensor([[3.0, -2.0], [0.5, 9.0]]), (8, 8)).sum() == 0
