"""Importance of tokens, on models where it is known."""

import pytest
import torch
from torch import nn

import saccade
from saccade.explanation.hooks.gates import gated
from saccade.explanation.scores.importance import class_logits, class_score, gradient_importance, occlusion_importance
from saccade.tokens.trace import num_tokens
from tests.explanation.models import LinearModel

WEIGHTS = torch.tensor([[3.0, -1.0, 0.0, 2.0], [0.0, 1.0, 0.0, 0.0]])


@pytest.mark.parametrize("regroup", [False, True])
def test_importance_in_a_linear_model_is_each_tokens_contribution(regroup):
    model, images = LinearModel(WEIGHTS, regroup), torch.rand(2, 3, 4, 4)
    values = nn.functional.adaptive_avg_pool2d(images, 2).mean(1).flatten(1)
    if regroup:
        values = values + images.flatten(2).mean(1).mean(1, keepdim=True)
    (gradient,) = gradient_importance(model, images, class_score(0), [4])
    torch.testing.assert_close(gradient, values * WEIGHTS[0])
    drop = occlusion_importance(model, images[:1], class_score(0), step=0, count=4, batch_size=3)
    torch.testing.assert_close(drop, values[0] * WEIGHTS[0])
    some = occlusion_importance(model, images[:1], class_score(0), step=0, count=4, tokens=[3, 0])
    torch.testing.assert_close(some, drop[[3, 0]])


def test_gradient_of_an_unused_step_is_zero():
    class Unused(LinearModel):
        def forward(self, images):
            self.group(images)
            return self.weights.sum(1).expand(len(images), -1)

    (gradient,) = gradient_importance(Unused(WEIGHTS), torch.rand(2, 3, 4, 4), class_score(0), [4])
    assert torch.equal(gradient, torch.zeros(2, 4))


@pytest.mark.parametrize("name", ["svit_nano", "paca_nano", "vt_nano", "sparseformer_nano"])
def test_gradient_matches_finite_differences_of_the_gates(name):
    torch.manual_seed(0)
    model = saccade.create_model(name, num_classes=10).eval().double()
    for parameter in model.parameters():  # layers initialised to zero would hide the tokens
        if parameter.abs().max() == 0:
            nn.init.normal_(parameter, std=0.05)
    images = torch.rand(1, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad(), saccade.record(model) as traces:
        model(images)
    counts = [num_tokens(trace) for trace in traces]
    gradients = gradient_importance(model, images, class_score(3), counts)
    delta = 1e-4
    for step, count in enumerate(counts):
        gates = torch.ones(1, count, dtype=torch.float64)
        for token in (0, count - 1):
            outputs = []
            for sign in (1, -1):
                gates[0, token] = 1 + sign * delta
                with torch.no_grad(), gated(model, {step: gates}):
                    outputs.append(model(images)[0, 3])
                gates[0, token] = 1
            measured = (outputs[0] - outputs[1]) / (2 * delta)
            assert gradients[step][0, token].item() == pytest.approx(measured.item(), rel=2e-2, abs=1e-6)
    drops = occlusion_importance(model, images, class_score(3), len(counts) - 1, counts[-1])
    assert drops.shape == (counts[-1],)
    assert drops.abs().max() > 0


@pytest.mark.parametrize("name", ["svit_nano", "paca_nano", "vt_nano", "sparseformer_nano"])
def test_gradient_of_a_checkpointed_model_is_the_same(name):
    torch.manual_seed(0)
    model, images = saccade.create_model(name, num_classes=4).eval(), torch.rand(1, 3, 64, 64)
    with torch.no_grad(), saccade.record(model) as traces:
        model(images)
    counts = [num_tokens(trace) for trace in traces]
    expected = gradient_importance(model, images, class_score(0), counts)
    model.set_grad_checkpointing()
    gradients = gradient_importance(model, images, class_score(0), counts)
    for gradient, value in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, value)


def test_importance_removes_its_hooks():
    model = LinearModel(WEIGHTS)
    occlusion_importance(model, torch.rand(1, 3, 4, 4), class_score(0), 0, 4)
    gradient_importance(model, torch.rand(1, 3, 4, 4), class_score(0), [4])
    assert all(not module._forward_hooks for module in model.modules())


def test_class_score_of_a_segmenter_is_the_mean_over_pixels():
    logits = torch.rand(2, 5, 6, 7)
    torch.testing.assert_close(class_score(2)(logits), logits[:, 2].mean((1, 2)))


def test_class_score_refuses_other_outputs_and_classes():
    with pytest.raises(ValueError, match=r"expected class logits .*, got \(2, 3, 4\)"):
        class_logits(torch.rand(2, 3, 4))
    with pytest.raises(ValueError, match=r"expected class logits .*, got list"):
        class_logits([])
    with pytest.raises(ValueError, match="expected a class below 5, got 9"):
        class_score(9)(torch.rand(2, 5))
