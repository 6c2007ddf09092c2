"""Sampling between pixels against a loop over pixels, against `grid_sample`, and against its own derivative."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.layers.sampling import clamp_gradient, sample

SIZES = [(7, 9), (1, 4), (5, 1), (3, 5, 6), (1, 5, 6)]


def map_and_points(size, seed=0, batch=2, reach=0.3):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(batch, 4, *size, generator=generator, dtype=torch.float64)
    points = torch.rand(batch, 3, 5, len(size), generator=generator, dtype=torch.float64)
    return features, points * (1 + 2 * reach) - reach  # some outside


def loop(features, points):
    """Every pixel gives its share: the product over the axes of max(0, 1 - distance)."""
    size = features.shape[2:]
    total = torch.zeros(*points.shape[:3], features.shape[1], dtype=features.dtype)
    for place in itertools.product(*(range(n) for n in size)):
        share = torch.ones(points.shape[:3], dtype=points.dtype)
        for axis, (i, n) in enumerate(zip(place, size, strict=True)):
            coordinate = points[..., len(size) - 1 - axis]
            share = share * (1 - (coordinate * n - 0.5 - i).abs()).clamp(min=0)
        total += share[..., None] * features[(slice(None), slice(None), *place)][:, None, None]
    return total


def library(features, points):
    """What PyTorch has for it."""
    grid = 2 * points - 1
    if features.ndim == 5:
        return F.grid_sample(features, grid[:, None], align_corners=False)[:, :, 0].permute(0, 2, 3, 1)
    return F.grid_sample(features, grid, align_corners=False).permute(0, 2, 3, 1)


@pytest.mark.parametrize("size", SIZES)
def test_every_point_gets_its_shares_of_the_pixels_around_it(size):
    features, points = map_and_points(size)
    torch.testing.assert_close(sample(features, points), loop(features, points))


@given(height=st.integers(1, 12), width=st.integers(1, 12), frames=st.integers(0, 4), seed=st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_values_and_gradients_are_those_of_grid_sample(height, width, frames, seed):
    features, points = map_and_points((frames, height, width) if frames else (height, width), seed)
    features.requires_grad_()
    points.requires_grad_()
    ours, theirs = sample(features, points), library(features, points)
    torch.testing.assert_close(ours, theirs)
    weight = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), [features, points]),
        torch.autograd.grad((theirs * weight).sum(), [features, points]),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("size", [(6, 7), (3, 4, 5)])
def test_the_derivative_is_the_derivative(size):
    """In the middle of cells, away from the pixels' centres, where bilinear interpolation has a kink."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(1, 2, *size, generator=generator, dtype=torch.float64, requires_grad=True)
    cell = torch.randint(-1, min(size), (1, 2, 3, len(size)), generator=generator)
    inside = 0.2 + 0.6 * torch.rand(cell.shape, generator=generator, dtype=torch.float64)
    lengths = torch.tensor(size[::-1], dtype=torch.float64)
    points = ((cell + inside + 0.5) / lengths).requires_grad_()
    assert torch.autograd.gradcheck(sample, (features, points))


@given(dx=st.integers(-4, 4), dy=st.integers(-4, 4), seed=st.integers(0, 999))
@settings(max_examples=30, deadline=None)
def test_shifting_map_and_points_together_changes_nothing(dx, dy, seed):
    features, points = map_and_points((9, 11), seed, reach=0)
    far = F.pad(features, (8, 8, 8, 8))  # room to move: 25 x 27
    points = (points * torch.tensor([11, 9]) + 8) / torch.tensor([27, 25])
    moved = far.roll((dy, dx), (2, 3))
    shift = torch.tensor([dx / 27, dy / 25], dtype=torch.float64)
    torch.testing.assert_close(sample(moved, points + shift), sample(far, points))


@pytest.mark.parametrize("far", [-1e30, 1e30, -math.inf, math.inf, 5.0])
def test_outside_is_zero_however_far(far):
    features, points = map_and_points((5, 6))
    points[0, 0, 0, 0] = far
    sampled = sample(features, points.requires_grad_())
    assert (sampled[0, 0, 0] == 0).all()
    (gradient,) = torch.autograd.grad(sampled.sum(), points)
    assert gradient[0, 0, 0, 0] == 0


def test_a_lost_point_reads_nan_and_nothing_else():
    features, points = map_and_points((5, 6))
    points[0, 0, 0, 1] = math.nan
    lost = sample(features, points).isnan().all(-1)
    assert lost[0, 0, 0]
    assert lost.sum() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_type_is_that_of_the_map(dtype):
    features, points = map_and_points((7, 9))
    features, points = features.to(dtype).requires_grad_(), points.float().requires_grad_()
    sampled = sample(features, points)
    assert sampled.dtype == dtype
    torch.testing.assert_close(sampled.float(), sample(features.float(), points), rtol=0.01, atol=0.02)
    sampled.float().sum().backward()
    assert (features.grad.dtype, points.grad.dtype) == (dtype, torch.float32)


def test_the_form_for_compilers_is_the_same_function():
    features, points = map_and_points((7, 9))
    features.requires_grad_()
    points.requires_grad_()
    expected = sample(features, points)
    compiled = torch.compile(sample, fullgraph=True, backend="aot_eager")(features, points)
    torch.testing.assert_close(compiled, expected)
    for a, b in zip(
        torch.autograd.grad(compiled.square().sum(), [features, points]),
        torch.autograd.grad(expected.square().sum(), [features, points]),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", ["eager", "compiled", "autocast"])
def test_a_clamped_gradient_is_clamped_and_the_value_is_not(mode):
    clamp = torch.compile(clamp_gradient, fullgraph=True, backend="aot_eager") if mode == "compiled" else clamp_gradient
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        clamped = clamp(values, torch.tensor(0.5))
    assert torch.equal(clamped, values)
    (clamped * torch.tensor([0.1, -3.0, 4.0])).sum().backward()
    assert torch.equal(values.grad, torch.tensor([0.1, -0.5, 0.5]))
    torch._dynamo.reset()


def test_runs_that_must_repeat_exactly_do_not_take_the_kernel(monkeypatch):
    from saccade.layers import sampling

    taken = []
    monkeypatch.setattr(sampling, "suits", lambda *_: True)
    monkeypatch.setattr(sampling.looking, "sample", lambda *_: taken.append(1))
    features, points = torch.randn(1, 4, 5, 5), torch.rand(1, 2, 3, 2)
    sample(features, points)
    assert taken == [1]
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert sample(features, points).shape == (1, 2, 3, 4)
    assert taken == [1]
    with torch.no_grad():
        sample(features, points)
    assert taken == [1, 1]  # without gradients nothing is added up
