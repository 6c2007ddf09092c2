"""From what a user gives (a recipe, a model's name, single settings) to a complete recipe."""

import dataclasses
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import timm

from saccade.engine.recipe import Recipe, RecipeError, load_recipe, to_dict
from saccade.tasks.detection import REGION_HEADS

# Short names of settings: flags of `saccade train` and keyword arguments of `saccade.train`
SHORT = {
    "batch": "batch_size",
    "lr": "optimizer.lr",
    "size": "data.image_size",
    "limit": "data.limit",
    "pretrained": "model.pretrained",
    "freeze": "model.freeze",
    "early_stop": "trainer.early_stop",
}

# Defaults without a recipe. Fine-tuning: measured on folders of 60 images, see docs/training.md.
FINE_TUNING = {"batch_size": 16, "optimizer.lr": 3e-4}
DENSE = {"segmentation": {"batch_size": 8}, "detection": {"batch_size": 4, "augment.crop": "none"}}
NANO_SIZES = {"segmentation": 128, "detection": 320}  # of training images of nano models
MIN_STEPS, MAX_EPOCHS = 200, 100  # without a number of epochs, small data sets get this many steps

_logger = logging.getLogger(__name__)
Change = str | tuple[str, Any]  # "optimizer.lr=5e-4", or a key and its value


def resolve_recipe(
    recipe: Recipe | Mapping[str, Any] | str | Path | None,
    model: str | None = None,
    head: str | None = None,
    data: str | Path | None = None,
    changes: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> Recipe:
    """Return the recipe with model, head and data replaced, then the settings, then the changes ("key=value")."""
    if recipe is None and not model:
        raise RecipeError("nothing to train: give a recipe (recipes/*/*.yaml) or --model NAME.")
    given: list[Change] = [*_flatten(settings or {}), *changes]
    base: Any = to_dict(recipe) if isinstance(recipe, Recipe) else recipe
    if isinstance(recipe, str | Path):
        base = find_recipe(recipe)
    replaced: list[Change] = []
    if model:  # replaces the group: keyword arguments of the recipe's own model would not apply
        replaced.append(("model", {"name": model}))
    if head:
        replaced += [("task", task_of_head(head)), ("model.head", head)]
    if data is not None:
        replaced.append(("data.path", str(data)))
    if recipe is not None or model is None:
        return load_recipe(base, [*replaced, *given])
    keys = {change.partition("=")[0] if isinstance(change, str) else change[0] for change in given}
    defaults = _defaults(model, head, custom=any(key.startswith(("model.kwargs", "model.checkpoint")) for key in keys))
    result = load_recipe(None, [*replaced, *defaults, *given])
    if result.task == "classification" and (result.model.pretrained or result.model.checkpoint):
        result = load_recipe(None, [*replaced, *defaults, *FINE_TUNING.items(), *given])
    return result


def _flatten(settings: Mapping[str, Any]) -> list[Change]:
    """{"lr": 1e-3, "ema": {"decay": 0.9}} -> [("optimizer.lr", 1e-3), ("ema.decay", 0.9)]; None is left out."""
    groups = {field.name for field in dataclasses.fields(Recipe) if dataclasses.is_dataclass(field.type)}
    changes: list[Change] = []
    for key, value in settings.items():
        if isinstance(value, Mapping) and key in groups:
            changes += [(f"{key}.{name}", inner) for name, inner in value.items()]
        elif value is not None:
            changes.append((SHORT.get(key, key), value))
    return changes


def _defaults(model: str, head: str | None, custom: bool) -> list[Change]:
    """Return the defaults of a model without a recipe; it starts from pretrained weights if there are any."""
    task = "video" if is_video_model(model) else task_of_head(head) if head else "classification"
    defaults: dict[str, Any] = {"task": task} | DENSE.get(task, {})
    if task in NANO_SIZES and model.partition(".")[0].endswith("_nano"):
        defaults["data.image_size"] = NANO_SIZES[task]
    if not custom and task != "video":
        defaults["model.pretrained"] = timm.models.is_model_pretrained(model)
    return list(defaults.items())


def task_of_head(head: str) -> str:
    """Return the task of a head; "sparse" means segmentation unless the task is set to detection."""
    return "detection" if head in REGION_HEADS else "segmentation"


def is_video_model(name: str) -> bool:
    config = timm.models.get_pretrained_cfg(name, allow_unregistered=True)
    return config is not None and len(config.input_size) == 4


def fit_to_data(recipe: Recipe, count: int, choose_epochs: bool = False) -> Recipe:
    """Lower a batch size above `count` training images; with `choose_epochs`, give small data sets more epochs."""
    devices = recipe.trainer.devices if isinstance(recipe.trainer.devices, int) else 1
    unit = recipe.trainer.accumulate * devices * recipe.trainer.num_nodes
    unit *= 2 if (recipe.augment.mixup or recipe.augment.cutmix) and unit % 2 else 1
    batch_size = min(recipe.batch_size, count // unit * unit)
    if not batch_size:
        raise ValueError(f"expected at least {unit} training images (devices x accumulate), got {count}. Add images.")
    if batch_size != recipe.batch_size:
        _logger.warning("batch_size is %d instead of %d: %d training images.", batch_size, recipe.batch_size, count)
        recipe = dataclasses.replace(recipe, batch_size=batch_size)
    if choose_epochs:
        epochs = min(MAX_EPOCHS, max(recipe.epochs, math.ceil(MIN_STEPS / (count // batch_size))))
        recipe = dataclasses.replace(recipe, epochs=epochs)
    return recipe


def find_recipe(name: str | Path) -> Path:
    """Return the path of a recipe given as a path, as "imagenet/svit_small", or by its bare name "svit_small".

    Names are looked up in ./recipes, in this source tree and in the installed data files.
    """
    path = Path(name)
    if path.is_file():
        return path
    folders = [Path("recipes"), Path(__file__).parents[2] / "recipes", Path(sys.prefix) / "share/saccade/recipes"]
    recipes = {file.stem: file for folder in reversed(folders) for file in sorted(folder.glob("*/*.yaml"))}
    recipe_file = recipes.get(path.stem)
    if recipe_file is not None:
        folders_of_file = recipe_file.parent.parts
        if path.parent.parts in ((), ("recipes",), folders_of_file[-1:], folders_of_file[-2:]):
            return recipe_file
    close = get_close_matches(path.stem, recipes, n=1)
    hint = f"Did you mean {close[0]}?" if close else f"Known recipes: {', '.join(sorted(recipes))}."
    raise RecipeError(f"no recipe {name}. {hint}")
