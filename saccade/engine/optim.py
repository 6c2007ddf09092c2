"""Optimiser and schedule, both timm's; every number counted in updates."""

from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn
from torch.optim import Optimizer as TorchOptimizer

from saccade.engine.recipe import Optimizer, RecipeError, Schedule

FUSED = ("adamw", "adam", "sgd")


def make_optimizer(model: nn.Module, recipe: Optimizer, batch_size: int, fused: bool = False) -> TorchOptimizer:
    """No weight decay on biases, norms and what `model.no_weight_decay()` names."""
    kwargs = dict(recipe.kwargs)
    if isinstance(kwargs.get("betas"), list):
        kwargs["betas"] = tuple(kwargs["betas"])
    if fused and recipe.name in FUSED:
        kwargs.setdefault("fused", True)
    try:
        return create_optimizer_v2(
            model,
            opt=recipe.name,
            lr=learning_rate(recipe, batch_size),
            weight_decay=recipe.weight_decay,
            momentum=recipe.momentum,
            layer_decay=recipe.layer_decay,
            **kwargs,
        )
    except (TypeError, ValueError, AssertionError) as error:
        raise RecipeError(f"optimizer {recipe.name!r} cannot be made: {error}") from error


def learning_rate(recipe: Optimizer, batch_size: int) -> float:
    """The peak rate, scaled to the batch if the recipe says for which batch it is meant."""
    return recipe.lr * batch_size / recipe.reference_batch if recipe.reference_batch else recipe.lr


def make_schedule(optimizer: TorchOptimizer, recipe: Schedule, epochs: int, steps: int) -> Scheduler:
    """`steps` updates an epoch; ask it with `step_update(position)`. It keeps no state of its own."""
    constant = recipe.name == "constant"
    schedule, _ = create_scheduler_v2(
        optimizer,
        sched="step" if constant else recipe.name,
        num_epochs=epochs * steps - (round(recipe.warmup_epochs * steps) if recipe.warmup_first else 0),
        decay_epochs=max(1, round(recipe.decay_epochs * steps)),
        decay_rate=1.0 if constant else recipe.decay_rate,
        min_lr=recipe.min_lr,
        warmup_lr=recipe.warmup_lr,
        warmup_epochs=round(recipe.warmup_epochs * steps),
        warmup_prefix=recipe.warmup_first,
        step_on_epochs=False,
        updates_per_epoch=1,
    )
    assert schedule is not None
    return schedule
