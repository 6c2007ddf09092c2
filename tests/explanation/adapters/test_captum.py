"""`feature_mask` and `TokenModel` in Captum's methods."""

import pytest
import torch
from captum.attr import FeatureAblation, IntegratedGradients, KernelShap, ShapleyValueSampling
from torch import nn

import saccade
from saccade.explanation.adapters import TokenModel, feature_mask
from saccade.explanation.scores.importance import class_score, occlusion_importance
from tests.explanation.models import LinearModel, QuadrantModel

FAMILIES = ["svit_nano", "paca_nano", "vt_nano", "sparseformer_nano"]
WEIGHTS = torch.tensor([[3.0, -1.0, 0.0, 2.0], [0.0, 1.0, 0.0, 0.0]])


def random_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = saccade.create_model(name, num_classes=5).eval()
    for parameter in model.parameters():  # layers initialised to zero would hide the tokens
        if parameter.abs().max() == 0:
            nn.init.normal_(parameter, std=0.05)
    return model


def test_feature_mask_is_the_quadrants():
    mask = feature_mask(QuadrantModel(), torch.rand(2, 3, 64, 64))
    assert mask.shape == (2, 1, 64, 64)
    assert mask.dtype == torch.int64
    for token, (row, column) in enumerate([(0, 0), (0, 32), (32, 0), (32, 32)]):
        assert (mask[:, 0, row : row + 30, column : column + 30] == token).all()


def test_ablation_by_feature_mask_finds_the_only_quadrant_the_model_reads():
    model, images = QuadrantModel(), torch.rand(1, 3, 64, 64)
    values = FeatureAblation(model).attribute(images, target=0, feature_mask=feature_mask(model, images))
    torch.testing.assert_close(values[0, :, 0, 0], images[0, :, :32, :32].mean().expand(3), rtol=1e-4, atol=1e-5)
    assert values[..., 34:, 34:].abs().max() < 1e-6


@pytest.mark.parametrize("name", FAMILIES)
def test_attributions_by_feature_mask_are_constant_per_token(name):
    model, images = random_model(name), torch.rand(1, 3, 64, 64)
    mask = feature_mask(model, images)
    with torch.no_grad(), saccade.record(model) as traces:
        model(images)
    count = traces[-1].maps().shape[1]
    assert int(mask.min()) >= 0
    assert int(mask.max()) <= count
    values = KernelShap(model).attribute(images, target=1, feature_mask=mask, n_samples=8)
    for token in mask.unique():
        assert values[:, :, mask[0, 0] == token].unique().numel() == 1


def test_token_attributions_in_a_linear_model_are_each_tokens_contribution():
    model, images = LinearModel(WEIGHTS), torch.rand(2, 3, 4, 4)
    expected = nn.functional.adaptive_avg_pool2d(images, 2).mean(1).flatten(1) * WEIGHTS[0]
    tokens = TokenModel(model, images)
    for method in (IntegratedGradients(tokens), FeatureAblation(tokens), ShapleyValueSampling(tokens)):
        values = method.attribute(tokens.gates, target=0, additional_forward_args=images)
        torch.testing.assert_close(values.float(), expected, rtol=1e-4, atol=1e-5)
    maps = tokens.to_pixels(expected)
    assert maps.shape == (2, 1, 4, 4)
    torch.testing.assert_close(maps.sum((1, 2, 3)), expected.sum(1))


@pytest.mark.parametrize("name", FAMILIES)
def test_token_ablation_matches_occlusion_and_gradients_sum_to_the_difference(name):
    model, images = random_model(name), torch.rand(1, 3, 64, 64)
    tokens = TokenModel(model, images)
    count = tokens.gates.shape[1]
    ablation = FeatureAblation(tokens).attribute(
        tokens.gates, target=2, additional_forward_args=images, perturbations_per_eval=16
    )
    occlusion = occlusion_importance(model, images, class_score(2), tokens.index, count)
    torch.testing.assert_close(ablation[0], occlusion, rtol=1e-3, atol=1e-5)
    values, delta = IntegratedGradients(tokens).attribute(
        tokens.gates, target=2, additional_forward_args=images, n_steps=32, return_convergence_delta=True
    )
    with torch.no_grad():
        difference = (model(images) - tokens(torch.zeros_like(tokens.gates), images))[0, 2]
    torch.testing.assert_close(values.sum() - delta[0], difference.to(values.dtype), rtol=1e-3, atol=1e-4)


def test_token_model_refuses_attributions_of_another_step():
    tokens = TokenModel(QuadrantModel(), torch.rand(1, 3, 64, 64))
    with pytest.raises(ValueError, match=r"expected attributions \(1, 4\), got \(1, 9\)"):
        tokens.to_pixels(torch.zeros(1, 9))


def test_feature_mask_refuses_video_models():
    model = saccade.create_model("video_sparseformer_nano", num_classes=2).eval()
    frames = model.pretrained_cfg["input_size"][1]
    with pytest.raises(TypeError, match="got a video model"):
        feature_mask(model, torch.rand(1, 3, frames, 32, 32))
