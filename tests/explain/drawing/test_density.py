"""Top-hat density: exact, with a known peak."""

import math

import pytest
import torch

from saccade.explain.drawing.density import areas, top_hat
from saccade.explain.figures.sparseformer import density
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


def test_an_area_has_the_mean_and_spread_of_its_points():
    torch.manual_seed(0)
    points = torch.randn(2, 4000, 2) * torch.tensor([0.06, 0.11]) + torch.tensor([0.4, 0.55])
    found = areas(points, (300, 200))
    x, y = (torch.arange(200) + 0.5) / 200, (torch.arange(300) + 0.5) / 300
    for area in found:
        assert area.sum() == pytest.approx(0.956, abs=0.01)  # 2.5 deviations of a normal distribution in the plane
        share = area / area.sum()
        across, down = (share.sum(0) * x).sum(), (share.sum(1) * y).sum()
        assert (across.item(), down.item()) == (pytest.approx(0.4, abs=0.01), pytest.approx(0.55, abs=0.01))
        deviation = ((share.sum(1) * (y - down) ** 2).sum()).sqrt()
        assert deviation == pytest.approx(0.11, rel=0.1)


def test_a_token_that_looks_closely_leads_one_that_looks_widely():
    close, wide = torch.tensor([0.5, 0.5]) + torch.randn(2, 50, 2) * torch.tensor([[[0.03]], [[0.2]]])
    found = areas(torch.stack([close, wide]), (50, 50))
    assert found[0, 25, 25] > found[1, 25, 25]
    assert found[0, 5, 25] == 0 < found[1, 5, 25]
