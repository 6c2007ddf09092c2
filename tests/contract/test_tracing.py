"""The tracers timm's own suite uses: TorchScript and FX, on every registered model."""

import pytest
import torch
from timm.models import get_notrace_functions, get_notrace_modules
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

import saccade  # noqa: F401  (registers the models)
from tests.contract.names import NANOS, VIDEO_NANOS
from tests.contract.test_contract import ALL, fresh, pixels


def graph_of(model: torch.nn.Module) -> torch.nn.Module:
    """The model as an FX graph that gives its last node, as timm builds it."""
    options = dict(
        leaf_modules=get_notrace_modules(), autowrap_functions=get_notrace_functions(), param_shapes_constant=True
    )
    train, evaluation = get_graph_node_names(model, tracer_kwargs=options)
    return create_feature_extractor(
        model, train_return_nodes=[train[-1]], eval_return_nodes=[evaluation[-1]], tracer_kwargs=options
    )


@pytest.mark.parametrize("name", ALL)
def test_fx_graph_gives_the_same_logits(name):
    model, images = fresh(name).eval(), pixels(name, 1)
    with torch.inference_mode():
        expected = model(images)
        (logits,) = graph_of(model)(images).values()
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("name", NANOS + VIDEO_NANOS)
def test_fx_graph_trains(name):
    model = graph_of(fresh(name).train())
    (logits,) = model(pixels(name)).values()
    logits.square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
