"""`target_layers` and `reshape_transform` in pytorch-grad-cam."""

import gc

import numpy as np
import pytest
import torch
from pytorch_grad_cam import EigenCAM, GradCAM, LayerCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import nn

import saccade
from saccade.explanation.adapters import reshape_transform, target_layers
from saccade.models.sparseformer_v2 import SparseFormerV2
from saccade.tokens.locate import locate

FAMILIES = ["svit_nano", "paca_nano", "vt_nano", "sparseformer_nano", "sparseformer_v2"]


def random_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "sparseformer_v2":
        model = SparseFormerV2(
            num_tokens=10, num_classes=5, focus_dim=64, cortex_dim=64, depth=2, points=4, channels=16
        )
    else:
        model = saccade.create_model(name, num_classes=5)
    for parameter in model.parameters():  # layers initialised to zero would hide the tokens
        if parameter.abs().max() == 0:
            nn.init.normal_(parameter, std=0.05)
    return model.eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_grad_cam_follows_its_definition(name):
    """ReLU of the sum over channels of the features times their mean gradient, computed here by autograd."""
    model, images = random_model(name), torch.rand(2, 3, 64, 64)
    (layer,) = target_layers(model)
    transform = reshape_transform(model)
    with GradCAM(model=model, target_layers=[layer], reshape_transform=transform) as cam:
        result = cam(images, [ClassifierOutputTarget(3)] * 2)
    assert result.shape == (2, 64, 64)

    outputs = []
    handle = layer.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    score = model(images)[:, 3].sum()
    handle.remove()
    (gradient,) = torch.autograd.grad(score, outputs)
    features, gradient = outputs[0].detach(), gradient
    if transform is not None:
        with torch.no_grad(), saccade.record(model) as traces:
            model(images)
        side = traces[-1].size[0] // 4
        first = model.num_prefix_tokens
        features = locate(features[:, first:], traces[-1].regions, side, side)
        gradient = locate(gradient[:, first:], traces[-1].regions, side, side)
    expected = (features * gradient.mean((2, 3), keepdim=True)).sum(1).relu()
    expected = nn.functional.interpolate(expected[:, None], (64, 64), mode="bilinear")[:, 0].numpy()
    assert gradient.abs().max() > 0
    for ours, theirs in zip(expected, result, strict=True):  # grad-cam scales every map to [0, 1]
        if ours.max() > 1e-9:
            ours = (ours - ours.min()) / (ours.max() - ours.min())
            assert np.abs(ours - theirs).mean() < 0.05


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("method", [LayerCAM, EigenCAM])
def test_other_cams_run_on_every_family(name, method):
    model, images = random_model(name), torch.rand(1, 3, 64, 96)
    with method(model=model, target_layers=target_layers(model), reshape_transform=reshape_transform(model)) as cam:
        result = cam(images, [ClassifierOutputTarget(0)])
    assert result.shape == (1, 64, 96)
    assert np.isfinite(result).all()


def test_token_grid_places_each_token_at_its_region():
    model = random_model("sparseformer_nano")
    transform = reshape_transform(model)
    with torch.no_grad(), saccade.record(model) as traces:
        model(torch.rand(1, 3, 64, 64))
    regions = traces[-1].regions
    count = regions.shape[1]
    maps = transform(torch.eye(count)[None])[0]  # channel m is 1 for token m only
    torch.testing.assert_close(maps.sum(0), torch.ones(maps.shape[1:]))
    height, width = maps.shape[1:]
    centre = (regions[0, :, :2] + regions[0, :, 2:]) / 2
    for token in range(count):
        x, y = (centre[token] * torch.tensor([width, height])).long().clamp(min=0).tolist()
        x, y = min(x, width - 1), min(y, height - 1)
        assert maps[token, y, x] > 1 / count


def test_token_grid_removes_its_hook_when_it_is_deleted():
    model = random_model("sparseformer_nano")
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    transform = reshape_transform(model)
    assert sum(len(module._forward_hooks) for module in model.modules()) == hooks + 1
    with pytest.raises(ValueError, match="expected a forward pass"):
        transform(torch.zeros(1, 4, 8))
    del transform
    gc.collect()
    assert sum(len(module._forward_hooks) for module in model.modules()) == hooks


def test_vt_without_projector_uses_the_features_of_the_resnet():
    model = saccade.create_model("vt_nano", projector=False)
    assert target_layers(model) == [model.layer3]
    model = saccade.create_model("vt_nano")
    assert target_layers(model) == [model.layer4.blocks[-2].projector]


@pytest.mark.parametrize("model", [nn.Conv2d(3, 8, 3), "video_sparseformer_nano"], ids=["convolution", "video"])
def test_other_models_are_refused(model):
    model = saccade.create_model(model) if isinstance(model, str) else model
    with pytest.raises(TypeError, match="expected an image classifier of saccade"):
        target_layers(model)
    with pytest.raises(TypeError, match="expected an image classifier of saccade"):
        reshape_transform(model)
