"""Density of sampling points."""

import math

import pytest
import torch

from saccade.explanation.drawing.density import gaussian_maps, top_hat
from saccade.explanation.figures.sparseformer import sampling_density
from tests.explanation.planted import region_trace, step


@pytest.mark.parametrize("size", [(28, 28), (17, 40), (64, 33)])
@pytest.mark.shows("SF-77")
def test_top_hat_matches_the_maps_of_the_trace(size):
    torch.manual_seed(0)
    trace = region_trace([(0.5, 0.5)] * 5)
    trace = trace._replace(points=torch.rand(1, 5, 9, 2) * 1.4 - 0.2, size=size)  # some outside the image
    density = top_hat(trace.points[0], size, bandwidth=0.11)
    assert (density - trace.maps(bandwidth=0.11)[0]).abs().max() < 1e-6


@pytest.mark.shows("SF-77")
def test_radius_of_the_kernel_is_a_28th_of_the_image_by_default():
    """Points at 0.5: pixels at most 1/28 away count, 3.57 of 100 pixels."""
    row = top_hat(torch.full((1, 4, 2), 0.505), (100, 100))[0, 50]
    assert row.nonzero().flatten().tolist() == list(range(47, 54))


@pytest.mark.shows("SF-77")
def test_sampling_density_is_the_fraction_of_points():
    values = sampling_density(step(region_trace([(0.3, 0.7), (0.3, 0.7), (0.8, 0.2)], 0.005), (100, 100)), (100, 100))
    assert values[69:71, 29:31].min() == pytest.approx(2 / 3)
    assert values[19:21, 79:81].min() == pytest.approx(1 / 3)
    assert values[50, 50] == 0


def test_top_hat_of_one_point_is_a_disc():
    values = top_hat(torch.tensor([[0.5, 0.5]]), (400, 400), bandwidth=0.2)
    assert values.sum().item() / 400**2 == pytest.approx(math.pi * 0.04, rel=5e-3)


def test_top_hat_ignores_points_far_outside():
    assert top_hat(torch.tensor([[3.0, -2.0], [0.5, 9.0]]), (8, 8)).sum() == 0


def test_gaussian_map_has_the_mean_and_covariance_of_its_points():
    torch.manual_seed(0)
    points = torch.randn(2, 4000, 2) * torch.tensor([0.06, 0.11]) + torch.tensor([0.4, 0.55])
    maps = gaussian_maps(points, (300, 200))
    x, y = (torch.arange(200) + 0.5) / 200, (torch.arange(300) + 0.5) / 300
    for values in maps:
        assert values.sum() == pytest.approx(0.956, abs=0.01)  # 1 - exp(-2.5² / 2)
        distribution = values / values.sum()
        mean_x, mean_y = (distribution.sum(0) * x).sum(), (distribution.sum(1) * y).sum()
        assert (mean_x.item(), mean_y.item()) == (pytest.approx(0.4, abs=0.01), pytest.approx(0.55, abs=0.01))
        deviation = ((distribution.sum(1) * (y - mean_y) ** 2).sum()).sqrt()
        assert deviation == pytest.approx(0.11, rel=0.1)


def test_gaussian_map_of_a_small_area_is_stronger():
    torch.manual_seed(0)
    small, large = torch.tensor([0.5, 0.5]) + torch.randn(2, 50, 2) * torch.tensor([[[0.03]], [[0.2]]])
    maps = gaussian_maps(torch.stack([small, large]), (50, 50))
    assert maps[0, 25, 25] > maps[1, 25, 25]
    assert maps[0, 5, 25] == 0 < maps[1, 5, 25]
