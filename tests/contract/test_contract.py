"""What every model of saccade must do, whatever its family. The list comes from timm's registry.

Images are small and big variants get one image; the nano of each family goes through the whole programme, with the
real compiler. Video models take clips of 8 frames.
"""

import copy

import pytest
import timm
import torch
from torch import Tensor, nn

import saccade
from tests.contract.names import IMAGE_MODELS, NANOS, VIDEO_MODELS, VIDEO_NANOS

SMALL = NANOS + VIDEO_NANOS
LONG = [pytest.param(name, marks=pytest.mark.slow) for name in ("video_sparseformer_small", "video_sparseformer_base")]
VIDEO = [*VIDEO_NANOS, "video_sparseformer_tiny", *LONG]  # the long ones differ from tiny in their sizes alone
ALL = IMAGE_MODELS + VIDEO


def pixels(name: str, batch: int = 2, height: int = 64, width: int = 64, seed: int = 0) -> Tensor:
    shape = (batch, 3, 8, height, width) if name in VIDEO_MODELS else (batch, 3, height, width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fresh(name: str, **kwargs) -> nn.Module:
    torch.manual_seed(0)
    fewer = (
        {"inflation": 2, "repeats": 2, "depth": 2} if name in VIDEO_MODELS else {}
    )  # more of the same tokens, blocks
    return timm.create_model(name, **({"num_classes": 7} | fewer | kwargs))


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    """Within `tolerance` of the largest value: what float32 leaves of two orders of summation."""
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1e-6)


def test_the_registry_holds_the_models_of_the_design():
    assert sorted(IMAGE_MODELS + VIDEO_MODELS) == saccade.list_models() == sorted(timm.list_models(module="saccade"))


@pytest.mark.parametrize("name", ALL)
def test_forward_backward_and_every_parameter_learns(name):
    model = fresh(name).train()
    logits = model(pixels(name))
    assert logits.shape == (2, 7)
    logits.square().sum().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_features_have_the_promised_channels_and_strides_at_any_size(name):
    model = fresh(name, features_only=True).eval()
    channels, strides = model.feature_info.channels(), model.feature_info.reduction()
    assert len(channels) >= 4
    for height, width in ((64, 64), (40, 72), (75, 51)):
        with torch.no_grad():
            features = model(pixels(name, 1, height, width))
        for level, dim, stride in zip(features, channels, strides, strict=True):
            assert level.shape == (1, dim, -(-height // stride), -(-width // stride))
            assert level.isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_an_image_gets_the_same_answer_alone_and_in_a_batch(name):
    model, images = fresh(name).eval(), pixels(name, 3)
    with torch.no_grad():
        close(model(images), torch.cat([model(image[None]) for image in images]))


@pytest.mark.parametrize("name", ALL)
def test_timms_surface_is_there(name):
    model, images = fresh(name).eval(), pixels(name)
    with torch.no_grad():
        logits, features = model(images), model.forward_features(images)
        close(model.forward_head(features), logits)
        pooled = model.forward_head(features, pre_logits=True)
        assert pooled.shape == (2, model.head_hidden_size)
        assert model.get_classifier().out_features == model.num_classes == 7
        model.reset_classifier(3)
        assert model(images).shape == (2, 3)
        model.reset_classifier(0)
        close(model(images), pooled)
    matched = [timm.models.group_parameters(model, model.group_matcher(coarse=coarse)) for coarse in (True, False)]
    assert all(len(groups) > 2 for groups in matched)
    assert all(name in dict(model.named_parameters()) for name in model.no_weight_decay())
    assert fresh(name, in_chans=1).eval()(pixels(name)[:, :1]).shape == (2, 7)
    assert fresh(name, drop_rate=0.5, drop_path_rate=0.5).train()(images).isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_checkpointed_equals_plain(name):
    model, images = fresh(name).eval(), pixels(name)
    plain = torch.autograd.grad(model(images).square().sum(), list(model.parameters()))
    model.set_grad_checkpointing()
    checkpointed = torch.autograd.grad(model(images).square().sum(), list(model.parameters()))
    for (parameter_name, _), a, b in zip(model.named_parameters(), plain, checkpointed, strict=True):
        assert (a - b).abs().max() <= 1e-4 * a.abs().max() + 1e-7, parameter_name


@pytest.mark.parametrize("name", SMALL)
def test_intermediates_agree_with_the_features(name):
    model, images = fresh(name).eval(), pixels(name)
    with torch.no_grad():
        final, levels = model.forward_intermediates(images)
        close(final, model.forward_features(images))
        only = model.forward_intermediates(images, indices=[-2, -1], intermediates_only=True)
        for a, b in zip(only, levels[-2:], strict=True):
            close(a, b)
        early = model.forward_intermediates(images, indices=[0], stop_early=True, intermediates_only=True)
        close(early[0], levels[0])
        whole = [level.shape for level in levels]
        pruned = copy.deepcopy(model)
        assert pruned.prune_intermediate_layers(2) == [len(whole) - 2, len(whole) - 1]
        for a, b in zip(pruned.forward_intermediates(images, indices=2, intermediates_only=True), only, strict=True):
            close(a, b)


@pytest.mark.parametrize("name", ALL)
def test_a_copy_is_independent_and_equal(name):
    model, images = fresh(name).eval(), pixels(name, 1)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        expected = model(images)
        close(twin(images), expected)
        for parameter in twin.parameters():
            parameter.zero_()
        close(model(images), expected)


@pytest.mark.parametrize("name", ALL)
def test_bfloat16_stays_finite_and_near(name):
    model, images = fresh(name).eval(), pixels(name, 1)
    with torch.no_grad():
        expected = model(images)
        with torch.autocast("cpu", torch.bfloat16):
            close(model(images).float(), expected, 0.1)
        assert model.bfloat16()(images.bfloat16()).isfinite().all()


@pytest.mark.parametrize("name", SMALL)
def test_compiled_equals_eager(name):
    model, images = fresh(name).eval(), pixels(name)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        close(compiled(images), model(images))
    torch._dynamo.reset()


@pytest.mark.parametrize("name", SMALL)
def test_compiled_training_equals_eager(name):
    model, images = fresh(name).eval(), pixels(name)
    plain = torch.autograd.grad(model(images).square().sum(), list(model.parameters()))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    traced = torch.autograd.grad(compiled(images).square().sum(), list(model.parameters()))
    for (parameter_name, _), a, b in zip(model.named_parameters(), plain, traced, strict=True):
        assert (a - b).abs().max() <= 1e-3 * a.abs().max() + 1e-7, parameter_name
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in IMAGE_MODELS + VIDEO_MODELS if name not in SMALL])
def test_large_variants_trace_without_a_break(name):
    model, images = fresh(name).eval(), pixels(name, 1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        close(compiled(images), model(images))
    torch._dynamo.reset()


@pytest.mark.parametrize("name", SMALL)
def test_exported_equals_eager(name):
    model, images = fresh(name).eval(), pixels(name)
    exported = torch.export.export(model, (images,)).module()
    with torch.no_grad():
        close(exported(images), model(images))


@pytest.mark.parametrize("name", SMALL)
def test_recording_reports_and_leaves_no_trace_in_the_model(name):
    model, images = fresh(name).eval(), pixels(name)
    with torch.no_grad():
        silent = model(images)
        with saccade.record(model) as traces:
            assert torch.equal(model(images), silent)
        reported = len(traces)
        model(images)
    assert reported == len(traces) > 0
    for trace in traces:
        maps = trace.maps()
        assert maps.shape[0] == 2
        assert maps.isfinite().all()
        assert maps.min() >= 0
        assert trace.name


@pytest.mark.parametrize("name", SMALL)
def test_a_nano_is_small(name):
    assert sum(parameter.numel() for parameter in timm.create_model(name, num_classes=200).parameters()) <= 4e6


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_a_mistaken_image_is_named_at_the_door(name):
    model = fresh(name).eval()
    with pytest.raises(ValueError, match="channels-last"):
        model(torch.randn(1, 64, 64, 3))
    with pytest.raises(ValueError, match="batch axis"):
        model(torch.randn(3, 64, 64))


@pytest.mark.parametrize("name", VIDEO)
def test_a_mistaken_clip_is_named_at_the_door(name):
    model = fresh(name).eval()
    with pytest.raises(ValueError, match="channels-last"):
        model(torch.randn(1, 8, 64, 64, 3))
    with pytest.raises(ValueError, match="batch axis"):
        model(torch.randn(3, 8, 64, 64))
    with pytest.raises(ValueError, match="clips of one frame"):
        model(torch.randn(2, 3, 64, 64))
    with pytest.raises(ValueError, match="before the channels"):
        model(torch.randn(2, 8, 3, 64, 64))


@pytest.mark.parametrize("name", VIDEO)
def test_any_number_of_frames_of_any_size(name):
    model = fresh(name).eval()
    for frames, height, width in ((1, 32, 32), (5, 40, 72)):
        with torch.no_grad():
            assert model(torch.randn(1, 3, frames, height, width)).isfinite().all()
