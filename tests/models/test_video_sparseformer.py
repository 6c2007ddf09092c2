"""VideoSparseFormer: inflation of image weights, still clips against their image, the axis of time."""

import logging
import subprocess
import sys
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import saccade
from saccade.layers.boxes import centre_and_size
from saccade.models.checkpoint import identify
from saccade.tokens.regions import region_grid, region_tubes
from saccade.tokens.trace import RegionTrace, TubeTrace
from saccade.weights.read import CheckpointError
from tests.parity import kit
from tests.peak_memory import PEAK

VARIANT = "sparseformer_v1_tiny"
SMALL = dict(num_tokens=4, focus_dim=32, cortex_dim=48, depth=2, repeats=2, heads=4, points=9, channels=8)


@cache
def filled() -> dict[str, Tensor]:
    return kit.weights(VARIANT)


def awake(name: str, seed: int = 0, **options) -> nn.Module:
    """Return a small model with random zero-initialised layers: tokens shift their points and move their regions."""
    torch.manual_seed(seed)
    model = saccade.create_model(name, **({"num_classes": 5} | SMALL | options)).double().eval()
    for key, parameter in model.named_parameters():
        if key.endswith(("to_delta.weight", "to_offset.weight")):
            nn.init.normal_(parameter, std=0.3)
    return model


def video(**options) -> nn.Module:
    return awake("video_sparseformer_nano", **options)


def clips(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def still(images: Tensor, frames: int) -> Tensor:
    return images.unsqueeze(2).repeat(1, 1, frames, 1, 1)


# Image weights


@pytest.mark.shows("SF-61")
def test_still_clip_matches_the_authors_image_model():
    """With the authors' weights, n_t = 1 and equal frames, the logits are those of the authors' image model."""
    model = saccade.create_model("video_sparseformer_tiny", num_classes=1000, inflation=1)
    saccade.load_checkpoint(model, filled())
    with torch.no_grad():
        logits = model.double().eval()(still(kit.images("160x256"), 2))
    assert kit.error(logits, kit.golden(VARIANT)["logits/160x256"]) <= kit.FLOAT64


@pytest.mark.shows("SF-61")
@pytest.mark.parametrize("inflation", [1, 2, 4])
def test_still_clip_equals_its_image_for_every_inflation(inflation):
    """Segments with equal tokens attend alike, so their mean is that of the image, if every segment has a frame.

    With more segments than frames, the first and the last sample half a frame outside the clip, which is zero.
    """
    image, model = awake("sparseformer_nano"), video(inflation=inflation)
    saccade.load_checkpoint(model, image.state_dict())
    pixels = clips(2, 3, 32, 40)
    with torch.no_grad():
        torch.testing.assert_close(model(still(pixels, 4)), image(pixels))
        short = model(still(pixels, 1))
    assert torch.allclose(short, image(pixels)) == (inflation == 1)


@pytest.mark.shows("SF-61")
def test_inflation_is_reported(caplog):
    model = saccade.create_model("video_sparseformer_tiny")
    before = model.head.fc.weight.clone()
    with caplog.at_level(logging.WARNING):
        report = saccade.load_checkpoint(model, filled())
    assert report.source == "sparseformer (official)"
    assert set(report.new) == {"head.fc.weight", "head.fc.bias"}
    assert set(report.new.values()) == {"400 classes, the image model has 1000"}
    assert torch.equal(model.head.fc.weight, before)
    assert report.changed["embeddings"] == report.changed["regions"] == "repeated for 8 segments of time"
    zeros = {key for key, how in report.changed.items() if how == "zeros along time"}
    tokenizers = ("focus.blocks.0.tokenizer", "cortex.blocks.0.tokenizer")
    parts = ("placer.grid", "placer.to_offset.weight", "adjuster.to_delta.weight")
    assert zeros == {f"{tokenizer}.{part}" for tokenizer in tokenizers for part in parts}
    assert "6 changed (zeros along time)" in caplog.text
    assert "2 changed (repeated for 8 segments of time): " in caplog.text


@pytest.mark.shows("SF-61")
def test_inflated_weights_follow_the_layout():
    image, model = awake("sparseformer_nano"), video(inflation=3)
    saccade.load_checkpoint(model, image.state_dict())
    assert torch.equal(model.embeddings, image.embeddings.repeat(3, 1))
    for part, tubes in enumerate(model.regions.split(4)):
        ends = torch.tensor([part / 3, (part + 1) / 3]).expand(4, 2).double()
        torch.testing.assert_close(tubes[:, [0, 1, 3, 4]], image.regions)  # x0 y0 t0 x1 y1 t1
        torch.testing.assert_close(tubes[:, [2, 5]], ends, atol=1e-6, rtol=0)
    ours, theirs = model.focus.blocks[0].tokenizer, image.focus.blocks[0].tokenizer
    points = ours.placer.to_offset.weight.unflatten(0, (9, 3))  # x y t x y t …
    assert torch.equal(points[:, :2].flatten(0, 1), theirs.placer.to_offset.weight)
    assert not points[:, 2].any()
    assert torch.equal(ours.adjuster.to_delta.weight[[0, 1, 3, 4]], theirs.adjuster.to_delta.weight)
    assert not ours.adjuster.to_delta.weight[[2, 5]].any()


@pytest.mark.shows("SF-84")
def test_spread_of_points_in_time_keeps_the_image_model():
    """With 4 frames per segment; points are a third of the segment from its middle, so their deviation is 1/3."""
    image = awake("sparseformer_nano", points=16)
    models = {spread: video(inflation=2, points=16, time_spread=spread) for spread in (False, True)}
    pixels, gradients = clips(2, 3, 32, 40), {}
    for spread, model in models.items():
        report = saccade.load_checkpoint(model, image.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(model(still(pixels, 8)), image(pixels))
        grid = model.focus.blocks[0].tokenizer.placer.grid.unflatten(0, (-1, 3))[:, 2]
        assert (report.changed["focus.blocks.0.tokenizer.placer.grid"] == "spread along time") == spread
        assert grid.abs().max().item() == pytest.approx(spread / 3)
        model(clips(2, 3, 8, 32, 40)).square().sum().backward()
        weight = model.focus.blocks[0].tokenizer.placer.to_offset.weight.grad.unflatten(0, (-1, 3))
        gradients[spread] = weight[:, 2].norm().item()
    assert gradients[False] > 100 * gradients[True] > 0


def test_another_number_of_tokens_is_reinitialised_and_reported():
    model = video(num_tokens=9)
    report = saccade.load_checkpoint(model, awake("sparseformer_nano").state_dict())
    assert set(report.new) == {"embeddings", "regions"}
    assert "embeddings" not in report.changed


def test_image_model_rejects_video_weights():
    with pytest.raises(CheckpointError, match="Use the same size and options"):
        saccade.load_checkpoint(awake("sparseformer_nano", num_tokens=16), video().state_dict())


@pytest.mark.shows("SF-59")
def test_authors_video_layout_is_identified_and_loads():
    """Kernel 1x7x7, boxes x1 y1 t1 x2 y2 t2; the names are the image model's."""
    theirs = saccade.create_model("video_sparseformer_tiny", num_classes=1000)
    saccade.load_checkpoint(theirs, filled())
    names = kit.official_names(VARIANT, lambda official: saccade.convert_official(official, "sparseformer_tiny"))
    official = {names[name]: value for name, value in theirs.state_dict().items()}
    official["feat_extractor.conv1.weight"] = official["feat_extractor.conv1.weight"].unsqueeze(2)
    assert identify(official) == ("video_sparseformer_tiny", 1000)
    model = saccade.create_model("video_sparseformer_tiny", num_classes=1000)
    report = saccade.load_checkpoint(model, official)
    assert (report.new, report.changed, report.ignored) == ({}, {}, ())
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in model.state_dict().items())


def test_checkpoint_round_trip_is_exact(tmp_path):
    model, copy = video(), video(seed=1)
    saccade.save_checkpoint(model, tmp_path / "video.safetensors")
    assert saccade.load_checkpoint(copy, tmp_path / "video.safetensors").changed == {}
    pixels = clips(1, 3, 4, 32, 32)
    with torch.no_grad():
        assert torch.equal(copy(pixels), model(pixels))


# Time


@pytest.mark.shows("SF-57", "SF-60")
def test_tubes_tile_time():
    tubes = region_tubes(region_grid(4, "half"), 8)
    centre, size = centre_and_size(tubes)
    torch.testing.assert_close(centre[::4, 2], (torch.arange(8) + 0.5) / 8)
    torch.testing.assert_close(size[:, 2], torch.full((32,), 1 / 8))
    torch.testing.assert_close(centre[:4, :2], centre_and_size(region_grid(4, "half"))[0])


@pytest.mark.shows("SF-58", "SF-60")
def test_initial_tubes_sample_their_own_frames():
    model = saccade.create_model("video_sparseformer_nano", **SMALL).double().eval()
    pixels = clips(1, 3, 8, 32, 32).requires_grad_()
    features = model.stem(pixels[0].transpose(0, 1)).transpose(0, 1)[None]
    tokenizer = model.focus.blocks[0].tokenizer
    tokens, _, _ = tokenizer(model.embeddings[None], model.regions[None], features)
    for segment in range(4):
        (gradient,) = torch.autograd.grad(tokens[0, 4 * segment], pixels, torch.ones(32).double(), retain_graph=True)
        touched = set((gradient.abs().amax((0, 1, 3, 4)) > 0).nonzero().flatten().tolist())
        first, last = 2 * segment, 2 * segment + 1
        assert {first, last} <= touched <= {first - 1, first, last, last + 1}  # between frames, both neighbours count


@pytest.mark.shows("SF-57")
def test_reversed_clip_equals_mirrored_tubes():
    """Only the coordinate t depends on time: with t mirrored in the weights, a reversed clip gives the same logits."""
    model, mirrored = video(), video()
    with torch.no_grad():
        mirrored.regions[:, [2, 5]] = 1 - model.regions[:, [5, 2]]
        for part in (mirrored.focus, mirrored.cortex):
            tokenizer = part.blocks[0].tokenizer
            tokenizer.placer.grid.view(9, 3)[:, 2] *= -1
            tokenizer.placer.to_offset.weight.view(9, 3, -1)[:, 2] *= -1
            tokenizer.adjuster.to_delta.weight[2] *= -1  # the shift; a length has no direction
        pixels = clips(2, 3, 6, 32, 32)
        torch.testing.assert_close(mirrored(pixels.flip(2)), model(pixels))
        assert not torch.allclose(model(pixels.flip(2)), model(pixels))


@given(scale=st.floats(0.1, 1e4), seed=st.integers(0, 2**31))
@settings(max_examples=15, deadline=None)
def test_tubes_stay_finite_for_any_weights(scale, seed):
    model = video(seed=seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("to_delta.weight", "to_offset.weight", "norm.weight")):
                parameter.mul_(scale)
        model.float()
        with saccade.record(model) as traces:
            logits = model(clips(1, 3, 3, 32, 32, seed=seed % 1000).float())
    assert logits.isfinite().all()
    for trace in traces:
        assert trace.regions.isfinite().all()
        assert trace.points.isfinite().all()
        assert (centre_and_size(trace.regions)[1] >= 0).all()


# Traces


@pytest.mark.shows("SF-30")
def test_record_traces_every_sampling_step():
    model = video()
    with torch.no_grad(), saccade.record(model) as traces:
        model(clips(2, 3, 6, 32, 48))
    assert [(trace.name, trace.step) for trace in traces] == [
        ("focus.blocks.0", 0),
        ("focus.blocks.0", 1),
        ("cortex.blocks.0", 0),
    ]
    for trace in traces:
        assert isinstance(trace, TubeTrace)
        assert (trace.regions.shape, trace.points.shape) == ((2, 16, 6), (2, 16, 9, 3))
        assert trace.size == (6, 8, 12)
        assert trace.maps().shape == (2, 16, 6, 8, 12)


def test_clip_maps_sum_to_image_maps():
    """Points between the first and the last frame count fully, shared by the two frames beside them."""
    points = torch.rand(1, 3, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points[..., 2] = 0.1 + 0.8 * points[..., 2]
    tubes = TubeTrace(torch.zeros(1, 3, 6), points, (5, 6, 7)).maps(0.2)
    flat = RegionTrace(torch.zeros(1, 3, 4), points[..., :2], (6, 7)).maps(0.2)
    torch.testing.assert_close(tubes.sum(2), flat)


def test_point_between_frames_counts_in_both():
    point = torch.tensor([0.5, 0.5, 0.3125]).repeat(1, 1, 2, 1)  # of 4 frames: a quarter of the way from 0.5 to 1.5
    maps = TubeTrace(torch.zeros(1, 1, 6), point, (4, 1, 1)).maps()
    torch.testing.assert_close(maps.flatten(), torch.tensor([0.25, 0.75, 0.0, 0.0]))


# Interface


def test_intermediates_are_the_tokens_of_every_pass():
    model, pixels = video(), clips(1, 3, 4, 32, 32)
    with torch.no_grad():
        tokens, passes = model.forward_intermediates(pixels)
    assert [level.shape for level in passes] == [(1, 16, 32)] * 2 + [(1, 16, 48)] * 2
    assert torch.equal(passes[-1], tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(inflation=0), "inflation >= 1"),
        (dict(dense=True), "dense=True is for images"),
        (dict(features_only=True), "forward_intermediates"),
    ],
)
def test_wrong_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        saccade.create_model("video_sparseformer_nano", **options)


@pytest.mark.shows("SF-63")
def test_timm_configuration_has_the_clip_shape():
    import timm

    assert timm.models.get_pretrained_cfg("video_sparseformer_tiny").input_size == (3, 32, 224, 224)
    with torch.device("meta"):
        assert saccade.create_model("video_sparseformer_tiny").pretrained_cfg["input_size"] == (3, 32, 224, 224)
    with pytest.raises(RuntimeError, match="expected published weights of video_sparseformer_nano, got none"):
        saccade.create_model("video_sparseformer_nano", pretrained=True)


@pytest.mark.slow
def test_clip_of_32_frames_needs_less_than_2_gb():
    code = PEAK + (
        "import torch, saccade\n"
        "model = saccade.create_model('video_sparseformer_tiny').eval()\n"
        "with torch.inference_mode(): model(torch.randn(1, 3, 32, 224, 224))\n"
        "print(peak())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 2e9  # kilobytes; Python and torch themselves take about a quarter of it
