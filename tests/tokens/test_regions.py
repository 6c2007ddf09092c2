"""Region tokens against SparseFormer's equations: regions, points, mixing, gradients, traces; images and videos."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import saccade
from saccade.layers.boxes import centre_and_size
from saccade.ops.roi_sampling import sample
from saccade.tokens.regions import (
    AdaptiveDecoder,
    FixedPoints,
    LinearDecoder,
    PointPlacer,
    RegionAdjuster,
    RegionTokenizer,
    StaticDecoder,
    point_grid,
    region_grid,
)
from saccade.tokens.trace import RegionTrace


def randomised(module: nn.Module, seed: int = 0, std: float = 0.3) -> nn.Module:
    """Randomise all parameters, zero-initialised ones included; float64."""
    torch.manual_seed(seed)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module.double()


def tokenizer(dim=16, channels=6, points=9, axes=2, restrict=False, seed=0) -> RegionTokenizer:
    parts = RegionAdjuster(dim, axes), PointPlacer(dim, points, axes), AdaptiveDecoder(dim, channels, points)
    return randomised(RegionTokenizer(*parts, restrict_gradient=restrict), seed)


def scene(seed=0, batch=2, tokens=4, dim=16, channels=6, height=12, width=10):
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    regions = region_grid(tokens).double() + 0.02 * make(batch, tokens, 4)
    return make(batch, tokens, dim), regions, make(batch, channels, height, width)


# Initialisation (appendix A.3)


@pytest.mark.shows("SF-45")
def test_region_grid_half_is_inside_the_image_x_slowest():
    centre, size = centre_and_size(region_grid(49, "half"))
    assert torch.allclose(size, torch.tensor(0.5))
    line = torch.linspace(0.25, 0.75, 7)
    torch.testing.assert_close(centre[:7], torch.stack([torch.full((7,), 0.25), line], -1))
    torch.testing.assert_close(centre[::7, 0], line)


@pytest.mark.shows("SF-46")
def test_region_grid_cell_tiles_the_image():
    regions = region_grid(16, "cell")
    cells = {tuple(round(4 * value) for value in region) for region in regions.tolist()}
    assert cells == {(x, y, x + 1, y + 1) for x in range(4) for y in range(4)}


@pytest.mark.shows("SF-46")
def test_region_grid_whole_is_the_image():
    torch.testing.assert_close(region_grid(9, "whole"), torch.tensor([0.0, 0, 1, 1]).repeat(9, 1))


@pytest.mark.shows("SF-03")
@pytest.mark.parametrize("num_tokens", [1, 2, 50])
@pytest.mark.parametrize("init", ["half", "cell", "whole"])
def test_region_grid_of_any_number_is_inside_the_image(num_tokens, init):
    regions = region_grid(num_tokens, init)
    assert regions.shape == (num_tokens, 4)
    assert regions.min() >= -1e-6
    assert regions.max() <= 1 + 1e-6


@pytest.mark.shows("SF-05", "SF-07")
def test_point_placer_matches_eqs_2_and_3():
    """Offsets are a linear map of the normalised token, without bias, plus the grid: x and y of every point in turn."""
    torch.manual_seed(0)
    placer = PointPlacer(8, 9).double()
    torch.nn.init.normal_(placer.to_offset.weight)
    torch.nn.init.normal_(placer.norm.weight)
    tokens, region = torch.randn(2, 3, 8).double(), torch.tensor([0.2, 0.4, 0.6, 1.0]).double().expand(2, 3, 4)
    points = placer(tokens, region)[1]
    for token, placed in zip(tokens.flatten(0, 1), points.flatten(0, 1), strict=True):
        normed = (token - token.mean()) / (token.var(unbiased=False) + 1e-6).sqrt() * placer.norm.weight
        offsets = (placer.to_offset.weight @ normed + placer.grid).view(9, 2)  # Eq. 2
        offsets = (offsets - offsets.mean(0)) / (3 * (offsets.std(0) + 1e-5))
        expected = torch.tensor([0.4, 0.7]) + offsets * torch.tensor([0.4, 0.6])  # Eq. 3, without its factor
        torch.testing.assert_close(placed, expected)


@pytest.mark.shows("SF-08", "SF-43")
def test_point_placer_starts_on_a_grid_that_spans_the_region():
    """A 6x6 grid divided by three standard deviations covers 0.48 of the region to either side."""
    placer = PointPlacer(8, 36)
    region = torch.tensor([[[0.2, 0.4, 0.6, 1.0]]])
    points = placer(torch.randn(1, 1, 8), region)[1][0, 0]
    grid = point_grid(36)
    torch.testing.assert_close(grid[0], torch.tensor([-5 / 12, -5 / 12]))
    torch.testing.assert_close(grid[1] - grid[0], torch.tensor([0.0, 1 / 6]))
    spread = (points - torch.tensor([0.4, 0.7])) / torch.tensor([0.4, 0.6])
    torch.testing.assert_close(spread.abs().amax(0), torch.tensor([0.48, 0.48]), atol=0.005, rtol=0)
    torch.testing.assert_close(FixedPoints(36)(torch.zeros(1, 1, 8), region)[1][0, 0], points)


@pytest.mark.shows("SF-06", "SF-08")
def test_point_placer_scale_of_eq_3_gives_half_the_grid():
    tokens, regions, _ = scene()
    full, half = (randomised(PointPlacer(16, 9, scale=scale))(tokens, regions)[1] for scale in (1.0, 0.5))
    centre = centre_and_size(regions)[0].unsqueeze(2)
    torch.testing.assert_close(half - centre, (full - centre) / 2)


@pytest.mark.shows("SF-17", "SF-47")
def test_adaptive_decoder_starts_as_static_mixing():
    """With zero generator weights the matrices are those of the bias, Xavier uniform."""
    torch.manual_seed(0)
    adaptive, static = AdaptiveDecoder(16, 6, 9).double(), StaticDecoder(16, 6, 9).double()
    bias = adaptive.to_weights.bias.detach()
    static.channel_weights.data, static.point_weights.data = bias[:36].view(6, 6), bias[36:].view(9, 9)
    static.proj.load_state_dict(adaptive.proj.state_dict())
    assert static.channel_weights.abs().max() <= math.sqrt(6 / 12) < 1.2 * static.channel_weights.abs().max()
    assert static.point_weights.abs().max() <= math.sqrt(6 / 18) < 1.2 * static.point_weights.abs().max()
    tokens, regions, features = scene()
    points = FixedPoints(9)(tokens, regions)[1]
    torch.testing.assert_close(adaptive(tokens, features, points), static(tokens, features, points))


@pytest.mark.shows("SF-18", "SF-44")
def test_region_tokenizer_starts_without_moving_regions():
    parts = RegionAdjuster(16), PointPlacer(16, 9), AdaptiveDecoder(16, 6, 9)
    tokens, regions, features = scene()
    updated, moved, _ = RegionTokenizer(*parts, restrict_gradient=True).double()(tokens, regions, features)
    torch.testing.assert_close(moved, regions)
    assert (updated - tokens).norm() > 0


# One sampling step


@pytest.mark.shows("SF-13", "SF-14", "SF-15")
def test_adaptive_decoder_matches_eqs_4_to_6():
    torch.manual_seed(0)
    tokens, regions, features = scene()
    decoder = randomised(AdaptiveDecoder(16, 6, 9))
    points = FixedPoints(9)(tokens, regions)[1]
    decoded, gelu = decoder(tokens, features, points), nn.GELU()
    generated = decoder.to_weights(decoder.to_hidden(decoder.norm(tokens)))
    for b in range(2):
        for m in range(4):
            samples = sample(features[b : b + 1], points[b : b + 1, m : m + 1])[0, 0]  # (P, C)
            channel, point = generated[b, m, :36].view(6, 6), generated[b, m, 36:].view(9, 9)
            mixed = gelu(samples @ channel + decoder.channel_bias)
            mixed = gelu(point @ mixed + decoder.point_bias[:, None])
            torch.testing.assert_close(decoded[b, m], decoder.proj(mixed.flatten()))


@pytest.mark.shows("SF-16")
def test_linear_decoder_is_one_layer_on_the_samples():
    tokens, regions, features = scene()
    decoder, points = randomised(LinearDecoder(16, 6, 9)), FixedPoints(9)(tokens, regions)[1]
    expected = sample(features, points).flatten(2) @ decoder.proj.weight.T + decoder.proj.bias
    torch.testing.assert_close(decoder(tokens, features, points), expected)


@pytest.mark.shows("SF-07")
@given(seed=st.integers(0, 999), points=st.integers(2, 40))
@settings(max_examples=30, deadline=None)
def test_points_have_the_mean_of_their_region_and_a_third_of_its_size_as_deviation(seed, points):
    """For any token."""
    tokens, regions, _ = scene(seed)
    placed = randomised(PointPlacer(16, points, eps=0.0), seed, std=1.0)(tokens, regions)[1]
    centre, size = centre_and_size(regions)
    torch.testing.assert_close(placed.mean(2), centre)
    torch.testing.assert_close(placed.std(2), size.abs() / 3)


def test_equal_offsets_give_the_centre_with_finite_gradient():
    placer = PointPlacer(16, 9).double()
    placer.grid.data.zero_()
    tokens, regions, _ = scene()
    points = placer(tokens, regions)[1]
    torch.testing.assert_close(points, centre_and_size(regions)[0].unsqueeze(2).expand_as(points))
    points.sum().backward()
    assert placer.grid.grad.isfinite().all()


def test_point_placer_refuses_a_single_point():
    with pytest.raises(ValueError, match=r"expected points >= 2 .* got 1"):
        PointPlacer(16, 1)


@pytest.mark.shows("SF-21")
@given(scale=st.floats(1e-30, 1e15), seed=st.integers(0, 99))  # a LayerNorm overflows at 1e19
@settings(max_examples=30, deadline=None)
def test_regions_stay_finite_for_any_token_and_image(scale, seed):
    module = tokenizer(seed=seed).float()
    tokens, regions, features = (value.float() for value in scene(seed))
    for _ in range(5):
        _, regions, points = module(tokens * scale, regions, features * scale)
        assert regions.isfinite().all()
        assert points.isfinite().all()


@pytest.mark.shows("SF-20")
def test_region_tokenizer_passes_gradcheck_for_regions():
    """The chain region -> points -> samples -> token, in float64; points stay away from pixel centres."""
    module, (tokens, regions, features) = tokenizer(points=4), scene(seed=30, batch=1, tokens=1)
    module.adjuster = None
    points = module.placer(tokens, regions)[1] * torch.tensor([10, 12]) - 0.5
    assert (points - points.round()).abs().min() > 0.1
    assert torch.autograd.gradcheck(lambda regions: module(tokens, regions, features)[0], regions.requires_grad_())


@given(dx=st.integers(-3, 3), dy=st.integers(-3, 3), seed=st.integers(0, 999))
@settings(max_examples=25, deadline=None)
def test_tokens_are_invariant_to_a_common_shift_of_image_and_regions(dx, dy, seed):
    module, (tokens, regions, features) = tokenizer(seed=seed), scene(seed, height=40, width=50)
    module.adjuster = None
    regions = regions * 0.1 + 0.45  # in the middle, away from the border
    shift = torch.tensor([dx / 50, dy / 40], dtype=torch.float64).repeat(2)
    still, _, _ = module(tokens, regions, features)
    moved, _, _ = module(tokens, regions + shift, features.roll((dy, dx), (2, 3)))
    torch.testing.assert_close(moved, still)


@pytest.mark.shows("SF-51")
def test_drop_path_drops_the_region_adjustment_too():
    """With everything dropped, neither token nor region changes."""
    module, (tokens, regions, features) = tokenizer().train(), scene()
    updated, moved, _ = module(tokens, regions, features, 1.0)
    assert torch.equal(updated, tokens)
    torch.testing.assert_close(moved, regions)
    updated, moved, _ = module.eval()(tokens, regions, features, 1.0)
    assert (moved - regions).abs().max() > 1e-3


# Gradients of the points


def point_gradient(module, tokens, regions, features, factor=1.0):
    """Gradient at the points, in units of the image, of a steep loss."""
    gradients = []
    original = module.placer.forward

    def with_hook(*inputs):
        regions, points = original(*inputs)
        points.register_hook(gradients.append)
        return regions, points

    module.placer.forward = with_hook
    updated, _, _ = module(tokens, regions, features)
    (factor * updated.square().sum()).backward()
    module.placer.forward = original
    return gradients[0]


@pytest.mark.shows("SF-12")
def test_restrict_gradient_clamps_to_one_pixel_height():
    tokens, regions, features = scene()
    free = point_gradient(tokenizer(restrict=False), tokens, regions, features)
    clamped = point_gradient(tokenizer(restrict=True), tokens, regions, features)
    assert free.abs().max() > 2 / 12
    torch.testing.assert_close(clamped, free.clamp(-1 / 12, 1 / 12))


@pytest.mark.shows("SF-12")
def test_restrict_gradient_follows_the_loss_scale():
    tokens, regions, features = scene()
    module = tokenizer(restrict=True)
    clamped = point_gradient(module, tokens, regions, features)
    module.loss_scale.fill_(1024)
    torch.testing.assert_close(point_gradient(module, tokens, regions, features, 1024.0), 1024 * clamped)
    assert "loss_scale" not in module.state_dict()


@pytest.mark.shows("SF-20")
def test_classification_loss_reaches_the_regions():
    torch.manual_seed(0)
    model = saccade.create_model("sparseformer_nano", num_classes=4)
    nn.functional.cross_entropy(model(torch.randn(2, 3, 64, 64)), torch.tensor([0, 3])).backward()
    assert (model.regions.grad.abs() > 0).all()
    assert model.focus.blocks[0].tokenizer.adjuster.to_delta.weight.grad.norm() > 0
    assert model.focus.blocks[0].tokenizer.placer.to_offset.weight.grad.norm() > 0


# Traces


@pytest.mark.shows("SF-30")
def test_record_traces_every_sampling_step():
    model = saccade.create_model("sparseformer_nano").eval()
    with torch.no_grad(), saccade.record(model) as traces:
        tokens, regions, features = model.forward_tokens(torch.randn(2, 3, 64, 96))
    assert [(trace.name, trace.step) for trace in traces] == [
        *(("focus.blocks.0", step) for step in range(4)),
        ("cortex.blocks.0", 0),
    ]
    assert all(isinstance(trace, RegionTrace) and trace.size == (16, 24) for trace in traces)
    assert torch.equal(traces[-1].regions, regions)
    assert traces[0].points.shape == (2, 36, 16, 2)
    assert features.shape[2:] == traces[0].size
    assert traces[-1].tokens.shape == tokens.shape


@pytest.mark.shows("SF-77")
def test_region_trace_maps_are_the_fraction_of_points_in_reach():
    """Top-hat kernel: three of four points at one position, the fourth far away."""
    points = torch.tensor([[0.3125, 0.4375]] * 3 + [[2.0, 2.0]]).view(1, 1, 4, 2)  # centre of pixel (3, 2) of 8 x 8
    maps = RegionTrace(torch.zeros(1, 1, 4), points, (8, 8)).maps(bandwidth=0.15)
    expected = torch.zeros(8, 8)
    for row, column in ((3, 2), (2, 2), (4, 2), (3, 1), (3, 3)):  # 0.125 away; diagonals are 0.18 away
        expected[row, column] = 0.75
    assert torch.equal(maps[0, 0], expected)


# Videos: the same code on three axes


@pytest.mark.shows("SF-61")
def test_video_of_one_repeated_frame_equals_its_image():
    """One sampling step: identical frames, tubes inside the clip, no offsets along time."""
    flat, tube = tokenizer(), tokenizer(axes=3)
    flat.adjuster, tube.adjuster = None, None
    tube.placer.to_offset.weight.data.view(9, 3, 16)[:, :2] = flat.placer.to_offset.weight.data.view(9, 2, 16)
    tube.placer.grid.data.view(9, 3)[:, :2] = flat.placer.grid.data.view(9, 2)
    tube.placer.norm.load_state_dict(flat.placer.norm.state_dict())
    tube.decoder.load_state_dict(flat.decoder.state_dict())
    tokens, regions, features = scene()
    low, high = torch.full((2, 4, 1), 0.4).double(), torch.full((2, 4, 1), 0.6).double()
    tubes = torch.cat([regions[..., :2], low, regions[..., 2:], high], -1)
    video = features.unsqueeze(2).repeat(1, 1, 7, 1, 1)
    torch.testing.assert_close(tube(tokens, tubes, video)[0], flat(tokens, regions, features)[0])


def test_point_grid_of_videos_has_every_moment_per_row_and_column():
    grid = point_grid(36, axes=3)
    torch.testing.assert_close(grid[:, :2], point_grid(36))
    moments = grid[:, 2].view(6, 6)
    line = point_grid(36)[:6, 1]
    torch.testing.assert_close(moments.sort(0).values, line[:, None].expand(6, 6))
    torch.testing.assert_close(moments.sort(1).values, line.expand(6, 6))
