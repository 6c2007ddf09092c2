"""From a model's name, a recipe or settings to a complete recipe."""

import logging

import pytest
import torch
from safetensors.torch import load_file

from saccade.engine.recipe import RecipeError, load_recipe
from saccade.engine.resolve import FINE_TUNING, fit_to_data, resolve_recipe
from saccade.engine.train import assemble
from tests.weights.folder import SHIPPED, weights_in


@pytest.fixture(autouse=True)
def shipped_weights():
    with weights_in(SHIPPED):
        yield


def test_model_by_name_starts_from_embedded_weights():
    recipe = resolve_recipe(None, "svit_nano", data="photos")
    assert (recipe.model.pretrained, recipe.data.path, recipe.task) == (True, "photos", "classification")
    assert (recipe.batch_size, recipe.optimizer.lr) == (FINE_TUNING["batch_size"], FINE_TUNING["optimizer.lr"])
    setup = assemble(resolve_recipe(None, "svit_nano", data="scenes", settings={"data": {"workers": 0}, "limit": 20}))
    assert (setup.preprocess.size, setup.card.preprocess.size) == (128, 128), "the size the weights were trained for"
    weight = load_file(SHIPPED / "svit_nano.tiny_imagenet.safetensors")["stages.0.blocks.0.mlp.fc1.weight"]
    torch.testing.assert_close(setup.model.state_dict()["stages.0.blocks.0.mlp.fc1.weight"], weight.float())


@pytest.mark.parametrize(
    "given",
    [
        {"settings": {"pretrained": False}},
        {"changes": ["model.pretrained=false"]},
        {"changes": ["model.kwargs={depths: [1, 1, 1, 1]}"]},
        {"model": "svit_small"},  # no weights
    ],
)
def test_model_without_weights_or_from_scratch_has_other_defaults(given):
    recipe = resolve_recipe(**{"recipe": None, "model": "svit_nano"} | given)
    assert (recipe.model.pretrained, recipe.batch_size, recipe.optimizer.lr) == (False, 64, 1e-3)


def test_recipe_file_is_not_changed_by_defaults():
    assert resolve_recipe("svit_nano_cifar10") == load_recipe("recipes/small/svit_nano_cifar10.yaml")
    replaced = resolve_recipe("svit_nano_cifar10", "paca_nano")
    assert (replaced.model.name, replaced.model.pretrained) == ("paca_nano", False)


def test_settings_have_short_names_and_groups():
    recipe = resolve_recipe(
        None,
        "svit_nano",
        settings={"epochs": 3, "batch": 8, "lr": 0.1, "size": 96, "freeze": True, "early_stop": 4, "limit": 50,
                  "ema": {"decay": 0.5}, "seed": None},
        changes=["optimizer.lr=0.2"],
    )  # fmt: skip
    assert (recipe.epochs, recipe.batch_size, recipe.data.image_size, recipe.data.limit) == (3, 8, 96, 50)
    assert (recipe.model.freeze, recipe.trainer.early_stop, recipe.ema.decay) == (True, 4, 0.5)
    assert recipe.optimizer.lr == 0.2, "changes are applied last"
    with pytest.raises(RecipeError, match="unknown key learning"):
        resolve_recipe(None, "svit_nano", settings={"learning": 1})


@pytest.mark.parametrize(
    ("model", "head", "expected"),
    [
        ("svit_nano", "mask_rcnn", ("detection", 4, 320)),
        ("paca_nano", "paca", ("segmentation", 8, 128)),
        ("svit_small", "cascade_mask_rcnn", ("detection", 4, None)),
        ("video_sparseformer_nano", None, ("video", 64, None)),
    ],
)
def test_head_and_model_select_the_task(model, head, expected):
    recipe = resolve_recipe(None, model, head)
    assert (recipe.task, recipe.batch_size, recipe.data.image_size) == expected


def test_batch_larger_than_data_is_lowered(caplog):
    with caplog.at_level(logging.WARNING):
        assert fit_to_data(load_recipe(None), 54).batch_size == 54
    assert "batch_size is 54 instead of 64: 54 training images." in caplog.text
    mixed = load_recipe(None, ["augment.mixup=0.8", "trainer.accumulate=3"])
    assert fit_to_data(mixed, 53).batch_size == 48, "divisible by accumulation steps and even for mixup"
    assert fit_to_data(load_recipe(None), 64) == load_recipe(None)
    with pytest.raises(ValueError, match="expected at least 4 training images"):
        fit_to_data(load_recipe(None, ["trainer.devices=4"]), 3)


def test_small_data_gets_more_epochs():
    recipe = load_recipe(None, ["batch_size=16"])
    assert [fit_to_data(recipe, count, choose_epochs=True).epochs for count in (17, 54, 160, 10_000)] == [
        100,
        67,
        20,
        10,
    ]
    assert fit_to_data(recipe, 54).epochs == 10
