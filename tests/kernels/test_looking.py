"""The kernels of a look against their twins, forward and backward, with points outside the map and odd sizes."""

import pytest
import torch

from saccade.kernels import HAS_TRITON, looking
from saccade.kernels.launch import forget_plans
from saccade.layers.boxes import adjust
from saccade.layers.sampling import sample
from saccade.tokens.regions import sample_and_mix, spread_points

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is no kernel to compare")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernel runs in Triton's interpreter
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no bfloat16 products
SIZES = [(2, 20, 5, 7, 3, 9), (1, 8, 1, 6, 2, 4), (1, 16, 4, 1, 2, 5)]  # batch, channels, height, width, tokens, points
SIZES += [(4, 96, 56, 56, 49, 36), (2, 48, 33, 61, 10, 16)] if DEVICE == "cuda" else []


def values(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def look(size, dtype):
    batch, channels, height, width, tokens, points = size
    features = values(batch, channels, height, width, dtype=dtype).contiguous(memory_format=torch.channels_last)
    places = values(batch, tokens, points, 2) * 0.6 + 0.5  # some outside
    places[0, 0, 0] = torch.tensor([40.0, -3.0])  # one far outside
    return features, places


def error(ours, exact):
    return ((ours.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-12)).item()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (HALF, 1e-2)])
def test_sample_equals_its_twin(size, dtype, tolerance):
    features, places = look(size, dtype)
    features.requires_grad_()
    places.requires_grad_()
    exact = [value.detach().double().requires_grad_() for value in (features, places)]
    ours, twin = looking.sample(features.permute(0, 2, 3, 1), places), sample(*exact)
    assert ours.dtype == dtype
    assert error(ours, twin) < tolerance
    g = values(*ours.shape, dtype=dtype)
    for a, b in zip(
        torch.autograd.grad(ours, (features, places), g), torch.autograd.grad(twin, exact, g.double()), strict=True
    ):
        assert error(a, b) < tolerance


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (HALF, 1e-2)])
def test_mix_equals_its_twin(size, dtype, tolerance):
    features, places = look(size, dtype)
    batch, channels, _, _, tokens, points = size
    made = values(batch, tokens, channels**2 + points**2, dtype=dtype) * channels**-0.5  # matrices are views of one row
    matrices = [
        made[..., : channels**2].unflatten(-1, (channels, channels)),
        made[..., channels**2 :].unflatten(-1, (points, points)),
    ]
    biases = [values(channels), values(points)]
    assert looking.mixes(*matrices)
    ours = looking.mix(features.permute(0, 2, 3, 1), places, *matrices, *biases)
    exact = [value.double() for value in (features, places, *matrices, *biases)]
    assert error(ours, sample_and_mix(*exact)) < tolerance


def test_matrices_shared_by_all_tokens_are_read_too():
    shared = values(8, 8).expand(2, 3, -1, -1)
    assert looking.mixes(shared)
    assert not looking.mixes(shared.transpose(2, 3))


def placed(deltas, regions, offsets, grid, scale, eps):
    """What `looking.place` computes, by the library."""
    regions = adjust(regions, deltas.to(regions.dtype))
    offsets = (offsets.to(regions.dtype) + grid).unflatten(2, (-1, 2))
    return regions, spread_points(offsets, regions, scale, eps)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (HALF, 1e-2)])
@pytest.mark.parametrize(("tokens", "points", "scale"), [(3, 9, 1.0), (5, 36, 0.5), (19, 4, 1.0)])
def test_place_equals_its_twin(tokens, points, scale, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(looking, "PROGRAMS", 4)  # so that each has several tokens
    forget_plans()
    deltas, offsets = values(2, tokens, 4, dtype=dtype) * 2, values(2, tokens, 2 * points, dtype=dtype)
    regions = torch.tensor([0.1, 0.2, 0.7, 0.9], device=DEVICE).repeat(2, tokens, 1) + 0.05 * values(2, tokens, 4)
    deltas[0, 0, 2], deltas[0, 1, 3] = 50, -50  # beyond the limit of growth
    inputs = [value.requires_grad_() for value in (deltas, regions, offsets, values(2 * points))]
    exact = [value.detach().double().requires_grad_() for value in inputs]
    ours, twin = looking.place(*inputs, scale, 1e-5), placed(*exact, scale, 1e-5)
    for a, b in zip(ours, twin, strict=True):
        assert error(a, b) < 1e-5
    g = [values(*value.shape) for value in ours]
    for some in (g, [g[0], torch.zeros_like(g[1])], [torch.zeros_like(g[0]), g[1]]):
        found = torch.autograd.grad(ours, inputs, some, retain_graph=True)
        wanted = torch.autograd.grad(twin, exact, [value.double() for value in some], retain_graph=True)
        for value, a, b in zip(inputs, found, wanted, strict=True):
            assert a.dtype == value.dtype
            assert error(a, b) < tolerance
    forget_plans()


def test_points_in_one_place_have_no_slope():
    """The library's deviation of equal values has none either."""
    regions = torch.tensor([[[0.1, 0.2, 0.7, 0.9]]], device=DEVICE)
    offsets = torch.full((1, 1, 8), 0.25, device=DEVICE)
    inputs = [value.requires_grad_() for value in (torch.zeros(1, 1, 4, device=DEVICE), regions, offsets)]
    grid = torch.zeros(8, device=DEVICE)
    gradients = [
        torch.autograd.grad(place(*inputs, grid, 1.0, 1e-2)[1].square().sum(), inputs)
        for place in (looking.place, placed)
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
