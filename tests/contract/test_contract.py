"""What every registered model must do, whatever its family. The list comes from timm's registry.

Images are small, and large variants get one image; the nano of each family is also compiled by Inductor. Video models
take clips of 8 frames.
"""

import copy

import pytest
import timm
import torch
from torch import Tensor, nn

import saccade
from tests.contract.names import IMAGE_MODELS, NANOS, V2_MODELS, VIDEO_MODELS, VIDEO_NANOS

SMALL = NANOS + VIDEO_NANOS
REPRESENTATIVES = [*SMALL, "sparseformer_btsp_clip_base"]  # SparseFormer v2 has no nano
LONG = [pytest.param(name, marks=pytest.mark.slow) for name in ("video_sparseformer_small", "video_sparseformer_base")]
VIDEO = [*VIDEO_NANOS, "video_sparseformer_tiny", *LONG]  # small and base differ from tiny only in sizes
HEAVY = ("sparseformer_btsp_augreg_large", "sparseformer_btsp_clip_large")  # differ from base only in sizes
IMAGE = [pytest.param(name, marks=pytest.mark.slow) if name in HEAVY else name for name in IMAGE_MODELS]
ALL = IMAGE + VIDEO


def pixels(name: str, batch: int = 2, height: int = 64, width: int = 64, seed: int = 0) -> Tensor:
    shape = (batch, 3, 8, height, width) if name in VIDEO_MODELS else (batch, 3, height, width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def create(name: str, **kwargs) -> nn.Module:
    """A randomly initialised model; the largest with fewer of the same blocks, video models also with fewer tokens."""
    torch.manual_seed(0)
    fewer = {"inflation": 2, "repeats": 2, "depth": 2} if name in VIDEO_MODELS else {}
    fewer |= {"repeats": 2, "depth": 2} if name in V2_MODELS else {}
    return timm.create_model(name, **({"num_classes": 7} | fewer | kwargs))


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    """Within `tolerance` of the largest value: two orders of summation in float32 differ by less."""
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1e-6)


@pytest.mark.shows("X-01")
def test_registry_has_exactly_the_models_of_the_design():
    assert sorted(IMAGE_MODELS + VIDEO_MODELS) == saccade.list_models() == sorted(timm.list_models(module="saccade"))


# A shift of all scores of a softmax changes nothing: these have no gradient.
SOFTMAX_INVARIANT = ("to_score.bias", "to_key.norm.bn.bias")


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_every_parameter_has_a_gradient_that_is_not_zero(name):
    """In float64, with zero-initialised layers randomised and batch norms in evaluation mode."""
    model = create(name).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    model(pixels(name).double()).square().sum().backward()
    norms = {key: float(parameter.grad.norm()) for key, parameter in model.named_parameters()}
    zero = {key for key, norm in norms.items() if norm < 1e-10 * max(norms.values())}
    assert zero == {key for key in norms if key.endswith(SOFTMAX_INVARIANT)}


@pytest.mark.parametrize("name", ALL)
def test_forward_and_backward_are_finite(name):
    model = create(name).train()
    logits = model(pixels(name))
    assert logits.shape == (2, 7)
    logits.square().sum().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name


@pytest.mark.shows("SVIT-32", "SVIT-33", "X-03")
@pytest.mark.parametrize("name", IMAGE)
def test_features_only_has_stated_channels_and_strides_at_any_size(name):
    model = create(name, features_only=True).eval()
    channels, strides = model.feature_info.channels(), model.feature_info.reduction()
    assert len(channels) >= 4
    for height, width in ((64, 64), (40, 72), (75, 51)):
        with torch.no_grad():
            features = model(pixels(name, 1, height, width))
        for level, dim, stride in zip(features, channels, strides, strict=True):
            assert level.shape == (1, dim, -(-height // stride), -(-width // stride))
            assert level.isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_batch_equals_single_images(name):
    model, images = create(name).eval(), pixels(name, 3)
    with torch.no_grad():
        close(model(images), torch.cat([model(image[None]) for image in images]))


@pytest.mark.parametrize("name", ALL)
def test_timm_interface_is_complete(name):
    model, images = create(name).eval(), pixels(name)
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
    assert create(name, in_chans=1).eval()(pixels(name)[:, :1]).shape == (2, 7)
    assert create(name, drop_rate=0.5, drop_path_rate=0.5).train()(images).isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_gradient_checkpointing_equals_plain(name):
    model, images = create(name).eval(), pixels(name)
    plain = torch.autograd.grad(model(images).square().sum(), list(model.parameters()))
    model.set_grad_checkpointing()
    checkpointed = torch.autograd.grad(model(images).square().sum(), list(model.parameters()))
    for (parameter_name, _), a, b in zip(model.named_parameters(), plain, checkpointed, strict=True):
        assert (a - b).abs().max() <= 1e-4 * a.abs().max() + 1e-7, parameter_name


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_forward_intermediates_agrees_with_forward_features(name):
    model, images = create(name).eval(), pixels(name)
    with torch.no_grad():
        final, levels = model.forward_intermediates(images)
        close(final, model.forward_features(images))
        only = model.forward_intermediates(images, indices=[-2, -1], intermediates_only=True)
        for a, b in zip(only, levels[-2:], strict=True):
            close(a, b)
        early = model.forward_intermediates(images, indices=[0], stop_early=True, intermediates_only=True)
        close(early[0], levels[0])
        count = len(levels)
        pruned = copy.deepcopy(model)
        assert pruned.prune_intermediate_layers(2) == [count - 2, count - 1]
        for a, b in zip(pruned.forward_intermediates(images, indices=2, intermediates_only=True), only, strict=True):
            close(a, b)


@pytest.mark.parametrize("name", ALL)
def test_deepcopy_is_equal_and_independent(name):
    model, images = create(name).eval(), pixels(name, 1)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        expected = model(images)
        close(copied(images), expected)
        for parameter in copied.parameters():
            parameter.zero_()
        close(model(images), expected)


@pytest.mark.parametrize("name", ALL)
def test_bfloat16_is_finite_and_close(name):
    model, images = create(name).eval(), pixels(name, 1)
    with torch.no_grad():
        expected = model(images)
        with torch.autocast("cpu", torch.bfloat16):
            close(model(images).float(), expected, 0.1)
        assert model.bfloat16()(images.bfloat16()).isfinite().all()


LONG_TO_COMPILE = ("svit_nano", "paca_nano", "sparseformer_btsp_clip_base")
COMPILED = [pytest.param(name, marks=pytest.mark.slow) if name in LONG_TO_COMPILE else name for name in REPRESENTATIVES]


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_equals_eager(name):
    model, images = create(name).eval(), pixels(name)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        close(compiled(images), model(images))
    torch._dynamo.reset()


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_compiled_training_equals_eager(name):
    model, images = create(name).eval(), pixels(name)
    plain = torch.autograd.grad(model(images).square().sum(), list(model.parameters()))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    gradients = torch.autograd.grad(compiled(images).square().sum(), list(model.parameters()))
    for (parameter_name, _), a, b in zip(model.named_parameters(), plain, gradients, strict=True):
        assert (a - b).abs().max() <= 1e-3 * a.abs().max() + 1e-7, parameter_name
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in IMAGE_MODELS + VIDEO_MODELS if name not in SMALL])
def test_large_variants_compile_without_graph_break(name):
    model, images = create(name).eval(), pixels(name, 1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        close(compiled(images), model(images))
    torch._dynamo.reset()


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_exported_equals_eager(name):
    model, images = create(name).eval(), pixels(name)
    exported = torch.export.export(model, (images,)).module()
    with torch.no_grad():
        close(exported(images), model(images))


@pytest.mark.shows("X-06")
@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_record_returns_traces_and_leaves_outputs_unchanged(name):
    model, images = create(name).eval(), pixels(name)
    with torch.no_grad():
        expected = model(images)
        with saccade.record(model) as traces:
            assert torch.equal(model(images), expected)
        count = len(traces)
        model(images)
    assert count == len(traces) > 0
    for trace in traces:
        maps = trace.maps()
        assert maps.shape[0] == 2
        assert maps.isfinite().all()
        assert maps.min() >= 0
        assert trace.name


@pytest.mark.parametrize("name", SMALL)
def test_nano_has_at_most_4m_parameters(name):
    assert sum(parameter.numel() for parameter in timm.create_model(name, num_classes=200).parameters()) <= 4e6


@pytest.mark.parametrize("name", IMAGE)
def test_wrong_image_shape_is_an_error_with_a_hint(name):
    model = create(name).eval()
    with pytest.raises(ValueError, match="channels-last"):
        model(torch.randn(1, 64, 64, 3))
    with pytest.raises(ValueError, match="batch axis"):
        model(torch.randn(3, 64, 64))


@pytest.mark.parametrize("name", VIDEO)
def test_wrong_clip_shape_is_an_error_with_a_hint(name):
    model = create(name).eval()
    with pytest.raises(ValueError, match="channels-last"):
        model(torch.randn(1, 8, 64, 64, 3))
    with pytest.raises(ValueError, match="batch axis"):
        model(torch.randn(3, 8, 64, 64))
    with pytest.raises(ValueError, match="clips of one frame"):
        model(torch.randn(2, 3, 64, 64))
    with pytest.raises(ValueError, match="before the channels"):
        model(torch.randn(2, 8, 3, 64, 64))


@pytest.mark.parametrize("name", VIDEO)
def test_video_models_take_any_number_of_frames_and_size(name):
    model = create(name).eval()
    for frames, height, width in ((1, 32, 32), (5, 40, 72)):
        with torch.no_grad():
            assert model(torch.randn(1, 3, frames, height, width)).isfinite().all()
