"""Gates: factors on single tokens."""

import pytest
import timm
import torch

import saccade
from saccade.explanation.hooks.gates import gated
from saccade.tokens.trace import AssignmentTrace, num_tokens
from tests.explanation.models import Grouping, LinearModel

WEIGHTS = torch.tensor([[3.0, -1.0, 0.0, 2.0], [0.0, 1.0, 0.0, 0.0]])


def test_gates_scale_the_tokens():
    model, images = LinearModel(WEIGHTS), torch.rand(2, 3, 4, 4)
    tokens = model.group(images)[0].mean(2)  # (B, 4)
    gates = torch.rand(2, 4)
    with torch.no_grad(), gated(model, {0: gates}):
        torch.testing.assert_close(model(images), (tokens * gates) @ WEIGHTS.T)
    torch.testing.assert_close(model(images), tokens @ WEIGHTS.T)


def test_gates_scale_tokens_grouped_again_by_the_same_assignment():
    model, images = LinearModel(WEIGHTS, regroup=True), torch.rand(1, 3, 4, 4)
    with torch.no_grad(), gated(model, {0: torch.zeros(1, 4)}):
        assert model(images).tolist() == [[0, 0]]


@pytest.mark.parametrize("name", ["svit_nano", "paca_nano", "vt_nano", "sparseformer_nano"])
def test_gates_of_one_change_nothing_and_of_zero_do(name):
    torch.manual_seed(0)
    model = saccade.create_model(name, num_classes=10).eval().double()
    for parameter in model.parameters():  # layers initialised to zero would hide a change
        if parameter.abs().max() == 0:
            torch.nn.init.normal_(parameter, std=0.05)
    images = torch.rand(1, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad(), saccade.record(model) as traces:
        output = model(images)
    for step, trace in enumerate(traces):
        gates = torch.ones(1, num_tokens(trace), dtype=torch.float64)
        with torch.no_grad(), gated(model, {step: gates}):
            assert torch.equal(model(images), output)
        with torch.no_grad(), gated(model, {step: gates * 0}):
            assert not torch.equal(model(images), output)


def test_gates_of_a_checkpointed_model_count_steps_once():
    torch.manual_seed(0)
    model = saccade.create_model("svit_nano", num_classes=4).train()
    images = torch.rand(2, 3, 64, 64)

    def gradient() -> torch.Tensor:
        gates = torch.ones(2, 16, requires_grad=True)
        with gated(model, {2: gates}):
            torch.manual_seed(1)
            model(images)[:, 0].sum().backward()
        return gates.grad

    expected = gradient()
    model.set_grad_checkpointing()
    torch.testing.assert_close(gradient(), expected)


def test_gates_need_the_tokens_in_the_output():
    class Cloning(Grouping):
        def trace(self, inputs, output):
            return AssignmentTrace(output[1], (4, 4), tokens=output[0].clone())

    model = LinearModel(WEIGHTS)
    model.group = Cloning()
    with pytest.raises(ValueError, match="expected Cloning to return the tokens of its trace"):  # noqa: SIM117
        with gated(model, {0: torch.ones(1, 4)}):
            model(torch.rand(1, 3, 4, 4))
    assert all(not module._forward_hooks for module in model.modules())


@pytest.mark.shows("SVIT-57")
@pytest.mark.parametrize("options", [dict(img_size=64), dict(dynamic_img_size=True)])
def test_gates_of_a_timm_vit_scale_its_patches(options):
    """A patch whose embedding is 0 is one whose pixels are 0 if the embedding has no bias."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=3, **options).eval()
    model.patch_embed.proj.bias.data.zero_()
    images, gates = torch.randn(1, 3, 64, 64), torch.ones(1, 16)
    gates[0, 6] = 0  # second row, third column
    black = images.clone()
    black[:, :, 16:32, 32:48] = 0
    with torch.no_grad():
        with gated(model, {0: gates}):
            output = model(images)
        torch.testing.assert_close(output, model(black))
        assert (output - model(images)).abs().max() > 1e-4
