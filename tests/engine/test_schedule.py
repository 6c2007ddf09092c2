"""Learning rates at given epochs, and parameter groups."""

from pathlib import Path

import pytest
import torch

import saccade
from saccade.engine.recipe import Optimizer, RecipeError, Schedule, load_recipe
from saccade.engine.schedule import learning_rate, make_optimizer, make_schedule

STEPS = 100  # per epoch
RECIPES = Path(__file__).parents[2] / "recipes"


def rates(schedule: Schedule, lr: float, epochs: int, at: list[float]) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    built = make_schedule(optimizer, schedule, epochs, STEPS)
    result = []
    for epoch in at:
        built.step_update(round(epoch * STEPS))
        result.append(optimizer.param_groups[0]["lr"])
    return result


@pytest.mark.shows("VT-51")
def test_step_schedule_of_vt():
    schedule = load_recipe(RECIPES / "imagenet/vt_resnet18.yaml").schedule
    result = rates(schedule, 0.1, 90, [0, 29.99, 30, 59.99, 60, 89])
    assert result == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


@pytest.mark.shows("VT-53", "VT-58")
def test_warmup_then_exponential_decay_of_vt():
    schedule = load_recipe(RECIPES / "imagenet/vt_resnet18_advanced.yaml").schedule
    result = rates(schedule, 0.16, 400, [0, 2.5, 5, 6, 7, 105])
    assert result == pytest.approx([0.01, 0.085, 0.16, 0.158, 0.16 * 0.9875**2, 0.16 * 0.9875**100])


@pytest.mark.shows("SVIT-40", "SVIT-43")
def test_cosine_with_warmup():
    """1e-6 to 1e-3 in 5 epochs, then the cosine of the complete run down to 1e-5."""
    schedule = load_recipe(RECIPES / "imagenet/svit_small.yaml").schedule
    result = rates(schedule, 1e-3, 300, [0, 2.5, 150, 300])
    assert result == pytest.approx([1e-6, 0.5 * (1e-6 + 1e-3), 1e-5 + 0.5 * (1e-3 - 1e-5), 1e-5])


def test_constant_schedule_and_fractional_epochs():
    assert rates(Schedule("constant", warmup_epochs=0), 5e-6, 30, [0, 15, 30]) == pytest.approx([5e-6] * 3)
    assert rates(Schedule(warmup_epochs=0.5, warmup_lr=0.0), 1.0, 10, [0.25])[0] == pytest.approx(0.5)


def test_learning_rate_scales_with_reference_batch():
    assert learning_rate(Optimizer(lr=5e-4, reference_batch=512), 1024) == 1e-3
    assert learning_rate(Optimizer(lr=5e-4), 1024) == 5e-4


def test_no_weight_decay_on_biases_and_norms():
    model = saccade.create_model("svit_nano", position="ape")
    groups = make_optimizer(model, Optimizer(weight_decay=0.05), 64).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    for name, parameter in model.named_parameters():
        exempt = parameter.ndim == 1 or name.endswith(".table")
        assert (id(parameter) in decayed) != exempt, name


@pytest.mark.shows("SF-50")
@pytest.mark.parametrize("name", ["sparseformer_nano", "video_sparseformer_nano", "sparseformer_btsp_augreg_base"])
@pytest.mark.parametrize("options", [{}, {"lr_scale": {"head.": 10.0}}, {"layer_decay": 0.9}])
def test_no_weight_decay_on_regions(name, options):
    """Decay would pull the ends of every region to the corner of the image. Embeddings are decayed, as any matrix."""
    with torch.device("meta"):
        model = saccade.create_model(name)
    groups = make_optimizer(model, Optimizer(weight_decay=0.05, **options), 64).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        assert (id(parameter) in decayed) == (parameter.ndim > 1 and name != "regions"), name


def test_unknown_optimizer():
    with pytest.raises(RecipeError, match="cannot create optimizer 'adamv'"):
        make_optimizer(torch.nn.Linear(2, 2), Optimizer(name="adamv"), 64)
