"""Looking tokens against the paper's equations: regions, points, mixing, gradients, traces; in images and videos."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import saccade
from saccade.layers.boxes import centre_and_size
from saccade.layers.sampling import sample
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
    sample_and_mix,
)
from saccade.tokens.trace import RegionTrace


def awake(module: nn.Module, seed: int = 0, std: float = 0.3) -> nn.Module:
    """Layers that start at zero get something to say; float64."""
    torch.manual_seed(seed)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module.double()


def looker(dim=16, channels=6, points=9, axes=2, restrict=False, seed=0) -> RegionTokenizer:
    parts = RegionAdjuster(dim, axes), PointPlacer(dim, points, axes), AdaptiveDecoder(dim, channels, points)
    return awake(RegionTokenizer(*parts, restrict_gradient=restrict), seed)


def scene(seed=0, batch=2, tokens=4, dim=16, channels=6, height=12, width=10):
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    regions = region_grid(tokens).double() + 0.02 * make(batch, tokens, 4)
    return make(batch, tokens, dim), regions, make(batch, channels, height, width)


# Where tokens start (appendix A.3)


def test_half_regions_stand_on_a_grid_inside_the_image_x_slowest():
    centre, size = centre_and_size(region_grid(49, "half"))
    assert torch.allclose(size, torch.tensor(0.5))
    line = torch.linspace(0.25, 0.75, 7)
    torch.testing.assert_close(centre[:7], torch.stack([torch.full((7,), 0.25), line], -1))
    torch.testing.assert_close(centre[::7, 0], line)


def test_cell_regions_tile_the_image():
    regions = region_grid(16, "cell")
    cells = {tuple(round(4 * value) for value in region) for region in regions.tolist()}
    assert cells == {(x, y, x + 1, y + 1) for x in range(4) for y in range(4)}


def test_whole_regions_are_the_image():
    torch.testing.assert_close(region_grid(9, "whole"), torch.tensor([0.0, 0, 1, 1]).repeat(9, 1))


@pytest.mark.parametrize("num_tokens", [1, 2, 50])
@pytest.mark.parametrize("init", ["half", "cell", "whole"])
def test_any_number_of_regions_starts_inside_the_image(num_tokens, init):
    regions = region_grid(num_tokens, init)
    assert regions.shape == (num_tokens, 4)
    assert regions.min() >= -1e-6
    assert regions.max() <= 1 + 1e-6


def test_points_start_on_a_grid_that_spans_the_region():
    """SF-08: a 6x6 grid of unit spread / 3 covers 0.48 of the region to either side."""
    placer = PointPlacer(8, 36)
    region = torch.tensor([[[0.2, 0.4, 0.6, 1.0]]])
    points = placer(torch.randn(1, 1, 8), region)[0, 0]
    grid = point_grid(36)
    torch.testing.assert_close(grid[0], torch.tensor([-5 / 12, -5 / 12]))
    torch.testing.assert_close(grid[1] - grid[0], torch.tensor([0.0, 1 / 6]))
    spread = (points - torch.tensor([0.4, 0.7])) / torch.tensor([0.4, 0.6])
    torch.testing.assert_close(spread.abs().amax(0), torch.tensor([0.48, 0.48]), atol=0.005, rtol=0)
    torch.testing.assert_close(FixedPoints(36)(torch.zeros(1, 1, 8), region)[0, 0], points)


def test_the_factor_of_eq_3_halves_the_grid():
    tokens, regions, _ = scene()
    whole, half = (awake(PointPlacer(16, 9, scale=scale))(tokens, regions) for scale in (1.0, 0.5))
    centre = centre_and_size(regions)[0].unsqueeze(2)
    torch.testing.assert_close(half - centre, (whole - centre) / 2)


def test_adaptive_decoding_starts_as_static_mixing():
    """SF-17, SF-47: without a word from the token, the matrices are those of the bias, Xavier uniform."""
    torch.manual_seed(0)
    adaptive, static = AdaptiveDecoder(16, 6, 9).double(), StaticDecoder(16, 6, 9).double()
    bias = adaptive.to_weights.bias.detach()
    static.channel_weights.data, static.point_weights.data = bias[:36].view(6, 6), bias[36:].view(9, 9)
    static.proj.load_state_dict(adaptive.proj.state_dict())
    assert static.channel_weights.abs().max() <= math.sqrt(6 / 12) < 1.2 * static.channel_weights.abs().max()
    assert static.point_weights.abs().max() <= math.sqrt(6 / 18) < 1.2 * static.point_weights.abs().max()
    tokens, regions, features = scene()
    points = FixedPoints(9)(tokens, regions)
    torch.testing.assert_close(adaptive(tokens, features, points), static(tokens, features, points))


def test_regions_stay_and_tokens_are_told_apart_at_the_start():
    parts = RegionAdjuster(16), PointPlacer(16, 9), AdaptiveDecoder(16, 6, 9)
    tokens, regions, features = scene()
    seen, moved, _ = RegionTokenizer(*parts, restrict_gradient=True).double()(tokens, regions, features)
    torch.testing.assert_close(moved, regions)
    assert (seen - tokens).norm() > 0


# One look


def test_mixing_is_eq_4_to_6():
    torch.manual_seed(0)
    tokens, regions, features = scene()
    decoder = awake(AdaptiveDecoder(16, 6, 9))
    points = FixedPoints(9)(tokens, regions)
    decoded, gelu = decoder(tokens, features, points), nn.GELU()
    generated = decoder.to_weights(decoder.to_hidden(decoder.norm(tokens)))
    for b in range(2):
        for m in range(4):
            samples = sample(features[b : b + 1], points[b : b + 1, m : m + 1])[0, 0]  # (P, C)
            channel, point = generated[b, m, :36].view(6, 6), generated[b, m, 36:].view(9, 9)
            mixed = gelu(samples @ channel + decoder.channel_bias)
            mixed = gelu(point @ mixed + decoder.point_bias[:, None])
            torch.testing.assert_close(decoded[b, m], decoder.proj(mixed.flatten()))


def test_linear_decoding_is_one_layer_on_the_samples():
    tokens, regions, features = scene()
    decoder, points = awake(LinearDecoder(16, 6, 9)), FixedPoints(9)(tokens, regions)
    expected = sample(features, points).flatten(2) @ decoder.proj.weight.T + decoder.proj.bias
    torch.testing.assert_close(decoder(tokens, features, points), expected)


@given(seed=st.integers(0, 999), points=st.integers(2, 40))
@settings(max_examples=30, deadline=None)
def test_points_have_the_centre_of_their_region_and_a_third_of_its_size_as_spread(seed, points):
    """SF-07, whatever the token says."""
    tokens, regions, _ = scene(seed)
    placed = awake(PointPlacer(16, points, eps=0.0), seed, std=1.0)(tokens, regions)
    centre, size = centre_and_size(regions)
    torch.testing.assert_close(placed.mean(2), centre)
    torch.testing.assert_close(placed.std(2), size.abs() / 3)


def test_a_token_whose_offsets_agree_looks_at_its_centre_with_finite_gradient():
    placer = PointPlacer(16, 9).double()
    placer.grid.data.zero_()
    tokens, regions, _ = scene()
    points = placer(tokens, regions)
    torch.testing.assert_close(points, centre_and_size(regions)[0].unsqueeze(2).expand_as(points))
    points.sum().backward()
    assert placer.grid.grad.isfinite().all()


def test_a_token_needs_two_points():
    with pytest.raises(ValueError, match="at least 2 points to have a spread; got 1"):
        PointPlacer(16, 1)


@given(scale=st.floats(1e-30, 1e15), seed=st.integers(0, 99))  # a LayerNorm overflows at 1e19
@settings(max_examples=30, deadline=None)
def test_a_region_stays_finite_for_any_token_and_any_image(scale, seed):
    module = looker(seed=seed).float()
    tokens, regions, features = (value.float() for value in scene(seed))
    for _ in range(5):
        _, regions, points = module(tokens * scale, regions, features * scale)
        assert regions.isfinite().all()
        assert points.isfinite().all()


def test_moving_a_region_changes_what_is_seen_as_the_derivative_says():
    """The chain region -> points -> samples -> token, in float64; points stay away from pixel centres."""
    module, (tokens, regions, features) = looker(points=4), scene(seed=30, batch=1, tokens=1)
    module.adjuster = None
    points = module.placer(tokens, regions) * torch.tensor([10, 12]) - 0.5
    assert (points - points.round()).abs().min() > 0.1
    assert torch.autograd.gradcheck(lambda regions: module(tokens, regions, features)[0], regions.requires_grad_())


@given(dx=st.integers(-3, 3), dy=st.integers(-3, 3), seed=st.integers(0, 999))
@settings(max_examples=25, deadline=None)
def test_shifting_the_image_and_the_regions_together_leaves_the_tokens_alone(dx, dy, seed):
    module, (tokens, regions, features) = looker(seed=seed), scene(seed, height=40, width=50)
    module.adjuster = None
    regions = regions * 0.1 + 0.45  # in the middle, away from the border
    shift = torch.tensor([dx / 50, dy / 40], dtype=torch.float64).repeat(2)
    still, _, _ = module(tokens, regions, features)
    moved, _, _ = module(tokens, regions + shift, features.roll((dy, dx), (2, 3)))
    torch.testing.assert_close(moved, still)


def test_dropping_the_path_drops_the_adjustment_too():
    """SF-51: with everything dropped, neither token nor region moves."""
    module, (tokens, regions, features) = looker().train(), scene()
    seen, moved, _ = module(tokens, regions, features, 1.0)
    assert torch.equal(seen, tokens)
    torch.testing.assert_close(moved, regions)
    seen, moved, _ = module.eval()(tokens, regions, features, 1.0)
    assert (moved - regions).abs().max() > 1e-3


# Gradients of the points


def point_gradient(module, tokens, regions, features, factor=1.0):
    """What arrives at the points, in units of the image, of a steep loss."""
    arrived = []
    original = module.placer.forward

    def listen(*inputs):
        points = original(*inputs)
        points.register_hook(arrived.append)
        return points

    module.placer.forward = listen
    seen, _, _ = module(tokens, regions, features)
    (factor * seen.square().sum()).backward()
    module.placer.forward = original
    return arrived[0]


def test_gradient_of_a_point_is_restricted_to_one_pixel_height():
    tokens, regions, features = scene()
    free = point_gradient(looker(restrict=False), tokens, regions, features)
    held = point_gradient(looker(restrict=True), tokens, regions, features)
    assert free.abs().max() > 2 / 12
    torch.testing.assert_close(held, free.clamp(-1 / 12, 1 / 12))


def test_the_bound_follows_the_scale_of_the_loss():
    tokens, regions, features = scene()
    module = looker(restrict=True)
    held = point_gradient(module, tokens, regions, features)
    module.loss_scale.fill_(1024)
    torch.testing.assert_close(point_gradient(module, tokens, regions, features, 1024.0), 1024 * held)
    assert "loss_scale" not in module.state_dict()


def test_a_classification_loss_moves_the_regions():
    """SF-20: no box is ever supervised."""
    torch.manual_seed(0)
    model = saccade.create_model("sparseformer_nano", num_classes=4)
    nn.functional.cross_entropy(model(torch.randn(2, 3, 64, 64)), torch.tensor([0, 3])).backward()
    assert (model.regions.grad.abs() > 0).all()
    assert model.focus.blocks[0].look.adjuster.to_delta.weight.grad.norm() > 0
    assert model.focus.blocks[0].look.placer.to_offset.weight.grad.norm() > 0


# Traces


def test_traces_follow_the_tokens_through_every_look():
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


def test_maps_are_the_share_of_points_within_reach():
    """SF-77: a top-hat kernel. Three of four points at one place, the fourth far away."""
    points = torch.tensor([[0.3125, 0.4375]] * 3 + [[2.0, 2.0]]).view(1, 1, 4, 2)  # centre of pixel (3, 2) of 8 x 8
    maps = RegionTrace(torch.zeros(1, 1, 4), points, (8, 8)).maps(bandwidth=0.15)
    expected = torch.zeros(8, 8)
    for row, column in ((3, 2), (2, 2), (4, 2), (3, 1), (3, 3)):  # 0.125 away; diagonals are 0.18 away
        expected[row, column] = 0.75
    assert torch.equal(maps[0, 0], expected)


# Videos: the same code on three axes


def test_a_still_video_looks_like_its_image():
    """SF-61 for one look: identical frames, tubes inside the clip, no word about time."""
    flat, tube = looker(), looker(axes=3)
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


def test_points_spread_over_time_independently_of_their_place():
    grid = point_grid(36, axes=3)
    torch.testing.assert_close(grid[:, :2], point_grid(36))
    moments = grid[:, 2].view(6, 6)
    line = point_grid(36)[:6, 1]
    torch.testing.assert_close(moments.sort(0).values, line[:, None].expand(6, 6))
    torch.testing.assert_close(moments.sort(1).values, line.expand(6, 6))


def test_the_hot_step_has_one_signature_for_images_and_videos():
    generator = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.rand(shape, generator=generator)  # noqa: E731
    channel, point, biases = rand(2, 3, 5, 5), rand(2, 3, 4, 4), (rand(5), rand(4))
    image = sample_and_mix(rand(2, 5, 6, 7), rand(2, 3, 4, 2), channel, point, *biases)
    video = sample_and_mix(rand(2, 5, 3, 6, 7), rand(2, 3, 4, 3), channel, point, *biases)
    assert image.shape == video.shape == (2, 3, 4, 5)
