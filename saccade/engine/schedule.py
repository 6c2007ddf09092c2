"""Optimizer and learning-rate schedule, both from timm; schedules count optimizer steps."""

from typing import Any

from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn
from torch.optim import Optimizer as TorchOptimizer

from saccade.engine.recipe import Optimizer, RecipeError, Schedule

FUSED = ("adamw", "adam", "sgd")


def make_optimizer(model: nn.Module, recipe: Optimizer, batch_size: int, fused: bool = False) -> TorchOptimizer:
    """Create the optimizer, without weight decay on biases, norms and what `model.no_weight_decay()` names."""
    kwargs = dict(recipe.kwargs)
    if isinstance(kwargs.get("betas"), list):
        kwargs["betas"] = tuple(kwargs["betas"])
    if fused and recipe.name in FUSED:
        kwargs.setdefault("fused", True)
    try:
        return create_optimizer_v2(
            scaled_groups(model, recipe) if recipe.lr_scale else model,
            opt=recipe.name,
            lr=learning_rate(recipe, batch_size),
            weight_decay=recipe.weight_decay,
            momentum=recipe.momentum,
            layer_decay=recipe.layer_decay,
            **kwargs,
        )
    except (TypeError, ValueError, AssertionError) as error:
        raise RecipeError(f"cannot create optimizer {recipe.name!r}: {error}") from error


def scaled_groups(model: nn.Module, recipe: Optimizer) -> list[dict[str, Any]]:
    """Return parameter groups by learning-rate factor (`lr_scale`, read by timm's schedules) and weight decay."""
    exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else set()  # type: ignore[operator]
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    matched: set[str] = set()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        prefixes = [prefix for prefix in recipe.lr_scale if name.startswith(prefix)]
        matched.update(prefixes)
        scale = recipe.lr_scale[max(prefixes, key=len)] if prefixes else 1.0
        decay = 0.0 if parameter.ndim <= 1 or name in exempt else recipe.weight_decay
        groups.setdefault((scale, decay), []).append(parameter)
    if unknown := [prefix for prefix in recipe.lr_scale if prefix not in matched]:
        raise RecipeError(f"optimizer.lr_scale: no parameter name starts with {unknown[0]!r}.")
    return [{"params": params, "weight_decay": decay, "lr_scale": scale} for (scale, decay), params in groups.items()]


def learning_rate(recipe: Optimizer, batch_size: int) -> float:
    """Return the peak learning rate, scaled by batch_size / reference_batch if the recipe sets reference_batch."""
    return recipe.lr * batch_size / recipe.reference_batch if recipe.reference_batch else recipe.lr


def make_schedule(optimizer: TorchOptimizer, recipe: Schedule, epochs: int, steps: int) -> Scheduler:
    """Create a schedule with `steps` optimizer steps per epoch; `step_update(position)` sets the rate, statelessly."""
    constant = recipe.name == "constant"
    warmup = round(recipe.warmup_epochs * steps)
    schedule, _ = create_scheduler_v2(
        optimizer,
        sched="step" if constant else recipe.name,
        num_epochs=epochs * steps - (warmup if recipe.decay_after_warmup else 0),
        decay_epochs=max(1, round(recipe.decay_epochs * steps)),
        decay_milestones=[round(epoch * steps) for epoch in recipe.milestones],
        decay_rate=1.0 if constant else recipe.decay_rate,
        min_lr=recipe.min_lr,
        warmup_lr=recipe.warmup_lr,
        warmup_epochs=warmup,
        warmup_prefix=recipe.decay_after_warmup,
        step_on_epochs=False,
        updates_per_epoch=1,
    )
    assert schedule is not None
    return schedule
