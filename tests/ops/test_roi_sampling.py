"""Region sampling against loops, `grid_sample` and numeric derivatives; its kernels against the references."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from saccade import ops
from saccade.ops import roi_sampling
from saccade.ops._launch import record_specializations
from saccade.ops.roi_sampling import clamp_gradient, place_points, sample, sample_and_mix
from tests.ops.compare import DEVICE, HALF, check, kernels_allowed, needs_triton, randn

SIZES = [(7, 9), (1, 4), (5, 1), (3, 5, 6), (1, 5, 6)]


def features_and_points(size, seed=0, batch=2, reach=0.3):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(batch, 4, *size, generator=generator, dtype=torch.float64)
    points = torch.rand(batch, 3, 5, len(size), generator=generator, dtype=torch.float64)
    return features, points * (1 + 2 * reach) - reach  # some outside


def sample_loop(features, points):
    """Every pixel contributes the product over the axes of max(0, 1 - distance)."""
    size = features.shape[2:]
    total = torch.zeros(*points.shape[:3], features.shape[1], dtype=features.dtype)
    for pixel in itertools.product(*(range(length) for length in size)):
        weight = torch.ones(points.shape[:3], dtype=points.dtype)
        for axis, (i, length) in enumerate(zip(pixel, size, strict=True)):
            coordinate = points[..., len(size) - 1 - axis]
            weight = weight * (1 - (coordinate * length - 0.5 - i).abs()).clamp(min=0)
        total += weight[..., None] * features[(slice(None), slice(None), *pixel)][:, None, None]
    return total


def sample_by_torch(features, points):
    grid = 2 * points - 1
    if features.ndim == 5:
        return F.grid_sample(features, grid[:, None], align_corners=False)[:, :, 0].permute(0, 2, 3, 1)
    return F.grid_sample(features, grid, align_corners=False).permute(0, 2, 3, 1)


@pytest.mark.shows("SF-04", "SF-09", "SF-10", "SF-58")
@pytest.mark.parametrize("implementation", ["reference", "embedding_bag"])
@pytest.mark.parametrize("size", SIZES)
def test_sample_matches_loop_over_pixels(size, implementation):
    features, points = features_and_points(size)
    with ops.enabled(implementation != "reference"):
        assert sample.implementation(features, points) == implementation
        torch.testing.assert_close(sample(features, points), sample_loop(features, points))


@pytest.mark.shows("SF-10")
@given(height=st.integers(1, 12), width=st.integers(1, 12), frames=st.integers(0, 4), seed=st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_sample_has_values_and_gradients_of_grid_sample(height, width, frames, seed):
    features, points = features_and_points((frames, height, width) if frames else (height, width), seed)
    features.requires_grad_()
    points.requires_grad_()
    ours, theirs = sample(features, points), sample_by_torch(features, points)
    torch.testing.assert_close(ours, theirs)
    weight = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), [features, points]),
        torch.autograd.grad((theirs * weight).sum(), [features, points]),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("size", [(6, 7), (3, 4, 5)])
def test_sample_passes_gradcheck(size):
    """Away from pixel centres, where linear interpolation has a kink."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(1, 2, *size, generator=generator, dtype=torch.float64, requires_grad=True)
    cell = torch.randint(-1, min(size), (1, 2, 3, len(size)), generator=generator)
    inside = 0.2 + 0.6 * torch.rand(cell.shape, generator=generator, dtype=torch.float64)
    lengths = torch.tensor(size[::-1], dtype=torch.float64)
    points = ((cell + inside + 0.5) / lengths).requires_grad_()
    assert torch.autograd.gradcheck(sample, (features, points))


@given(dx=st.integers(-4, 4), dy=st.integers(-4, 4), seed=st.integers(0, 999))
@settings(max_examples=30, deadline=None)
def test_sample_is_invariant_to_a_common_shift(dx, dy, seed):
    features, points = features_and_points((9, 11), seed, reach=0)
    padded = F.pad(features, (8, 8, 8, 8))  # 25 x 27
    points = (points * torch.tensor([11, 9]) + 8) / torch.tensor([27, 25])
    moved = padded.roll((dy, dx), (2, 3))
    shift = torch.tensor([dx / 27, dy / 25], dtype=torch.float64)
    torch.testing.assert_close(sample(moved, points + shift), sample(padded, points))


@pytest.mark.parametrize("far", [-1e30, 1e30, -math.inf, math.inf, 5.0])
def test_sample_is_zero_outside(far):
    features, points = features_and_points((5, 6))
    points[0, 0, 0, 0] = far
    sampled = sample(features, points.requires_grad_())
    assert (sampled[0, 0, 0] == 0).all()
    (gradient,) = torch.autograd.grad(sampled.sum(), points)
    assert gradient[0, 0, 0, 0] == 0


def test_sample_of_a_nan_point_is_nan_there_only():
    features, points = features_and_points((5, 6))
    points[0, 0, 0, 1] = math.nan
    is_nan = sample(features, points).isnan().all(-1)
    assert is_nan[0, 0, 0]
    assert is_nan.sum() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sample_keeps_the_dtype_of_the_features(dtype):
    features, points = features_and_points((7, 9))
    features, points = features.to(dtype).requires_grad_(), points.float().requires_grad_()
    sampled = sample(features, points)
    assert sampled.dtype == dtype
    torch.testing.assert_close(sampled.float(), sample(features.float(), points), rtol=0.01, atol=0.02)
    sampled.float().sum().backward()
    assert (features.grad.dtype, points.grad.dtype) == (dtype, torch.float32)


def test_sample_compiled_equals_eager():
    features, points = features_and_points((7, 9))
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


@pytest.mark.shows("SF-12")
@pytest.mark.parametrize("mode", ["eager", "compiled", "autocast"])
def test_clamp_gradient_clamps_the_gradient_and_not_the_value(mode):
    clamp = torch.compile(clamp_gradient, fullgraph=True, backend="aot_eager") if mode == "compiled" else clamp_gradient
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        clamped = clamp(values, torch.tensor(0.5))
    assert torch.equal(clamped, values)
    (clamped * torch.tensor([0.1, -3.0, 4.0])).sum().backward()
    assert torch.equal(values.grad, torch.tensor([0.1, -0.5, 0.5]))
    torch._dynamo.reset()


@pytest.mark.shows("SF-58")
def test_sample_and_mix_takes_images_and_videos():
    weights, biases = randn(2, 3, 25 + 16), (randn(5), randn(4))
    image = sample_and_mix(randn(2, 5, 6, 7), randn(2, 3, 4, 2), weights, *biases)
    video = sample_and_mix(randn(2, 5, 3, 6, 7), randn(2, 3, 4, 3), weights, *biases)
    assert image.shape == video.shape == (2, 3, 4, 5)


@pytest.mark.shows("SF-14")
def test_sample_and_mix_matches_loop_over_tokens():
    """Eqs. 5 and 6, one token at a time."""
    features, points = randn(2, 5, 6, 7), randn(2, 3, 4, 2) * 0.3 + 0.5
    weights, channel_bias, point_bias = randn(2, 3, 25 + 16), randn(5), randn(4)
    mixed = sample_and_mix(features, points, weights, channel_bias, point_bias)
    sampled = sample(features, points)
    for b, m in itertools.product(range(2), range(3)):
        channel, point = weights[b, m, :25].view(5, 5), weights[b, m, 25:].view(4, 4)
        expected = F.gelu(point @ F.gelu(sampled[b, m] @ channel + channel_bias) + point_bias[:, None])
        torch.testing.assert_close(mixed[b, m], expected, rtol=1e-4, atol=1e-5)


# Kernels against references. Sizes: batch, channels, height, width, tokens, points.

KERNEL_SIZES = [(2, 20, 5, 7, 3, 9), (1, 8, 1, 6, 2, 4), (1, 16, 4, 1, 2, 5), (0, 16, 4, 4, 2, 4)]
KERNEL_SIZES += [(4, 96, 56, 56, 49, 36), (2, 48, 33, 61, 10, 16)] if DEVICE == "cuda" else []


def kernel_inputs(size, dtype=torch.float32):
    batch, channels, height, width, tokens, points = size
    features = randn(batch, channels, height, width, dtype=dtype).contiguous(memory_format=torch.channels_last)
    places = randn(batch, tokens, points, 2) * 0.6 + 0.5  # some outside
    if batch:
        places[0, 0, 0] = torch.tensor([40.0, -3.0])  # one far outside
    weights = torch.cat([randn(batch, tokens, n * n) * n**-0.5 for n in (channels, points)], dim=2).to(dtype)
    return features, places, weights, randn(channels), randn(points)


@needs_triton
@pytest.mark.parametrize("size", KERNEL_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_sample_kernel_matches_reference(size, dtype):
    check(sample, *kernel_inputs(size, dtype)[:2])


@needs_triton
@pytest.mark.parametrize("size", [*KERNEL_SIZES, (1, 96, 7, 5, 2, 36), (1, 48, 5, 5, 1, 49)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("backward", [False, True])
def test_sample_and_mix_kernel_matches_reference(size, dtype, backward):
    if backward and dtype == torch.float32 and (size[1] > 48 or size[5] > 16):
        pytest.skip("the reference trains these in float32")
    check(sample_and_mix, *kernel_inputs(size, dtype), backward=backward)


@needs_triton
def test_sample_and_mix_kernel_takes_weights_with_gaps_and_in_other_orders():
    features, points, weights, *biases = kernel_inputs((2, 20, 5, 7, 3, 9))
    wide = weights.new_full((2, 3, weights.shape[2] + 7), float("nan"))
    wide[..., : weights.shape[2]] = weights
    layouts = [wide[..., : weights.shape[2]], weights.transpose(0, 1).contiguous().transpose(0, 1)]
    with kernels_allowed():
        expected = sample_and_mix(features, points, weights, *biases)
        for layout in layouts:
            assert torch.equal(sample_and_mix(features, points, layout, *biases), expected)
        shared = weights[:1, :1].expand(2, 3, -1)  # one pair of matrices for all tokens
        torch.testing.assert_close(
            sample_and_mix(features, points, shared, *biases),
            sample_and_mix(features, points, shared.contiguous(), *biases),
        )


@needs_triton
@pytest.mark.shows("SF-06", "SF-07", "SF-19")
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("tokens", "points", "scale"), [(3, 9, 1.0), (5, 36, 0.5), (19, 4, 1.0)])
def test_place_points_kernel_matches_reference(tokens, points, scale, dtype, monkeypatch):
    monkeypatch.setattr(roi_sampling, "PROGRAMS", 4)  # several tokens per program
    deltas, offsets = randn(2, tokens, 4, dtype=dtype) * 2, randn(2, tokens, 2 * points, dtype=dtype)
    regions = torch.tensor([0.1, 0.2, 0.7, 0.9], device=DEVICE).repeat(2, tokens, 1) + 0.05 * randn(2, tokens, 4)
    deltas[0, 0, 2], deltas[0, 1, 3] = 50, -50  # beyond MAX_GROWTH
    regions[0, 1] = regions[0, 1, [2, 1, 0, 3]]  # flipped
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    check(place_points, regions, deltas, offsets, randn(2 * points), scale, 1e-5, tolerance=tolerance)


@needs_triton
def test_place_points_kernel_gives_equal_offsets_no_gradient():
    """The derivative of the standard deviation of equal values is zero, as in PyTorch."""
    regions = torch.tensor([[[0.1, 0.2, 0.7, 0.9]]], device=DEVICE)
    inputs = regions, torch.zeros(1, 1, 4, device=DEVICE), torch.full((1, 1, 8), 0.25, device=DEVICE)
    check(place_points, *inputs, torch.zeros(8, device=DEVICE), 1.0, 1e-2, tolerance=1e-4)


@needs_triton
def test_sampling_kernels_are_not_compiled_per_image_size():
    with kernels_allowed(), record_specializations(execute=False) as compiled:
        for size in range(32, 332):
            batch = 1 + size % 4
            features, points, weights, *biases = kernel_inputs((batch, 16, size // 4, size // 5, 3, 4), HALF)
            inputs = [value.requires_grad_() for value in (features, points, weights, *biases)]
            sample_and_mix(*inputs).sum().backward()
            regions = torch.rand(batch, 3, 4, requires_grad=True)
            place_points(regions, regions, torch.rand(batch, 3, 8), torch.rand(8), 1.0, 1e-5)[1].sum().backward()
    kernels = sorted(key.kernel for key in compiled)
    assert kernels == [
        *["_column_sum_kernel"] * 4,  # for few rows and for many, of two widths
        "_mix_backward_kernel", "_mix_kernel", "_place_backward_kernel", "_place_kernel", "_sample_backward_kernel",
        "_sample_kernel",
    ]  # fmt: skip


@needs_triton
def test_sampling_dispatch_follows_shape_dtype_and_determinism(monkeypatch):
    features, points, weights, *biases = kernel_inputs((1, 8, 5, 5, 2, 4))
    assert sample.implementation(features, points) == ("triton" if DEVICE == "cuda" else "embedding_bag")
    with kernels_allowed():
        assert sample_and_mix.implementation(features, points, weights, *biases) == "triton"
        assert sample_and_mix.implementation(features, points.double(), weights, *biases) == "reference"
        assert sample_and_mix.implementation(features, randn(1, 2, 65, 2), weights, *biases) == "reference"
        assert sample_and_mix.implementation(randn(1, 129, 5, 5), points, weights, *biases) == "reference"
        assert sample_and_mix.implementation(features, randn(1, 2, 4, 3), weights, *biases) == "reference"
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert sample.implementation(features, points) == "embedding_bag"
        assert sample_and_mix.implementation(features, points, weights, *biases) == "reference"
        with torch.no_grad():  # without gradients nothing is summed in any order
            assert sample.implementation(features, points) == "triton"
            assert sample_and_mix.implementation(features, points, weights, *biases) == "triton"


@needs_triton
def test_sampling_operators_are_consistent():
    features, points, weights, *biases = (value.requires_grad_() for value in kernel_inputs((2, 8, 5, 6, 3, 4)))
    opcheck(roi_sampling._mix_op.operator, (features, points, weights, *biases))
    opcheck(roi_sampling._sample_op.operator, (features, points))
    regions = torch.rand(2, 3, 4, requires_grad=True)
    inputs = regions, randn(2, 3, 4).requires_grad_(), randn(2, 3, 8).requires_grad_(), randn(8).requires_grad_()
    opcheck(roi_sampling._place_points.operator, (*inputs, 1.0, 1e-5))
