"""A recipe and a folder -> a trained model, its logs, its report."""

import logging
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn

from saccade.engine.checkpointing import Keeper, Signals, Stopped
from saccade.engine.clock import Clock
from saccade.engine.loaders import Sources
from saccade.engine.logs import Bar, History
from saccade.engine.module import Assembly, Training
from saccade.engine.recipe import Recipe, RecipeError, load_recipe, to_dict, to_yaml
from saccade.engine.report import write_report
from saccade.engine.results import describe_run, write_json, write_text
from saccade.engine.sync_batchnorm import SyncNorms
from saccade.engine.tasks.classify import Classify
from saccade.engine.tasks.detect import Detect
from saccade.engine.tasks.segment import Segment
from saccade.tasks.open import open_task_model

TASKS: dict[str, type[Training]] = {
    "classification": Classify,
    "segmentation": Segment,
    "detection": Detect,
    "video": Classify,
}

# A continued run may not change these: its updates would no longer be the ones that were planned.
FIXED = ("task", "model.", "epochs", "batch_size", "seed", "data.scenes", "data.val_fraction", "trainer.accumulate")


class Run(NamedTuple):
    """What a run left behind."""

    out: Path
    result: dict[str, Any]  # as in result.json
    model: nn.Module  # with the weights that were kept last
    stopped: str = ""  # the signal that ended it early; continue with resume


@contextmanager
def settings_kept() -> Iterator[None]:
    """Whether algorithms must repeat exactly, and whether cuDNN tries several: behind this as before it."""
    exact, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn
    benchmark, deterministic = cudnn.benchmark, cudnn.deterministic
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(exact, warn_only=warn)
        cudnn.benchmark, cudnn.deterministic = benchmark, deterministic


@settings_kept()
def train(
    recipe: Recipe,
    out: str | Path,
    resume: bool = False,
    device: str | None = None,
    command: str = "",
    progress: bool = True,
) -> Run:
    """Train as `recipe` says into the folder `out`; with `resume`, go on where its last state stands (if any).

    `device` overrides the recipe's accelerator: "cpu", "cuda", "cuda:1". Gives back the run on process 0; the other
    processes of a distributed run get a `Run` without result.
    """
    started = time.monotonic()
    out = Path(out)
    state = prepare_folder(out, recipe, resume)
    model, card, sources, sizes = assemble(recipe)
    steps = count_updates(recipe, sources)
    clock = Clock(recipe.epochs * steps, recipe.trainer.max_minutes, started)
    module = TASKS[recipe.task](model, recipe, sources, sizes, clock, str(out))
    if recipe.trainer.compile:
        module.compile_model(recipe.trainer.compile_mode)
    keeper, history = Keeper(out, card, recipe.trainer.save_every), History(out)
    with quiet_lightning(), Signals(keeper) as signals:
        callbacks = [history, keeper, signals] + ([Bar()] if progress else [])
        trainer = Trainer(**trainer_options(recipe, device), callbacks=callbacks)
        stopped = ""
        try:
            trainer.fit(module, ckpt_path=str(state) if state else None)
        except Stopped as signal:
            stopped = str(signal)
        except SIGTERMException:  # Lightning saw the signal first, after a validation; the keeper has saved
            stopped = "SIGTERM"
    if not trainer.is_global_zero:
        return Run(out, {}, model)
    if stopped:
        return Run(out, {"stopped": stopped, "step": clock.steps}, module.kept, stopped)
    final, device_used = open_task_model(out / "last.safetensors")[0], trainer.strategy.root_device
    evaluation = module.evaluate(final, device_used)
    result = describe_run(final, module, evaluation, keeper.best, command, device_used)
    write_json(out / "result.json", result)
    write_report(out / "report.html", result, history.rows, module.sections(final, evaluation), recipe)
    return Run(out, result, final)


def prepare_folder(out: Path, recipe: Recipe, resume: bool) -> Path | None:
    """Make the folder and save the resolved recipe in it; gives the state to continue from, if there is one."""
    state, saved = out / "last.ckpt", out / "recipe.yaml"
    if state.exists() and not resume:
        raise RecipeError(f"{out} holds a run already: continue it with --resume, or choose another --out.")
    if state.exists() and saved.exists():
        for key, before, now in differences(to_dict(load_recipe(saved)), to_dict(recipe)):
            if key.startswith(FIXED):
                raise RecipeError(f"{key} was {before!r} and is now {now!r}: a run cannot continue with another one.")
            logging.getLogger(__name__).warning("continuing with %s=%r (was %r)", key, now, before)
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        write_text(saved, to_yaml(recipe))
    return state if state.exists() else None


def differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """(key, before, now) of every value that differs."""
    found = []
    for key in now:
        if isinstance(now[key], dict) and isinstance(before.get(key), dict) and key != "kwargs":
            found += differences(before[key], now[key], f"{prefix}{key}.")
        elif before.get(key) != now[key]:
            found.append((f"{prefix}{key}", before.get(key), now[key]))
    return found


def assemble(recipe: Recipe) -> Assembly:
    """Model, its card, the data and the input it gets, as the recipe's task makes them."""
    made = TASKS[recipe.task].assemble(recipe)
    if recipe.trainer.channels_last:
        made.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if recipe.trainer.grad_checkpointing:
        made.model.set_grad_checkpointing()  # type: ignore[operator]
    return made


def count_updates(recipe: Recipe, sources: Sources) -> int:
    count = len(sources.train) if sources.train_memory is None else len(sources.train_memory.labels)
    if recipe.batch_size > count:
        raise RecipeError(f"batch_size {recipe.batch_size} is more than the {count} training pictures: lower it.")
    return count // recipe.batch_size


def trainer_options(recipe: Recipe, device: str | None) -> dict[str, Any]:
    """The recipe in the words of Lightning's Trainer."""
    wanted = recipe.trainer
    accelerator, devices = wanted.accelerator, wanted.devices
    if device is not None:
        kind, _, number = device.partition(":")
        accelerator = {"cuda": "gpu"}.get(kind, kind)
        if number:
            devices = [int(number)]
    options: dict[str, Any] = {
        "accelerator": accelerator,
        "devices": devices,
        "num_nodes": wanted.num_nodes,
        "strategy": wanted.strategy,
        "precision": wanted.precision,
        "max_epochs": -1,  # the clock decides
        "accumulate_grad_batches": wanted.accumulate,
        "gradient_clip_val": recipe.optimizer.clip_grad,
        "deterministic": wanted.deterministic or None,
        # Detection has other shapes in every update, and each would be measured anew.
        "benchmark": not wanted.deterministic and recipe.task != "detection",
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    if wanted.sync_batchnorm:
        options["plugins"] = [SyncNorms(accelerator)]
    return options


class quiet_lightning:
    """Lightning's tips and notices on hardware do not help the person who waits; its errors still come through."""

    LOGGERS = ("lightning", "lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero")

    def __enter__(self) -> None:
        self.levels = {name: logging.getLogger(name).level for name in self.LOGGERS}
        for name in self.LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
        self.caught = warnings.catch_warnings()
        self.caught.__enter__()
        warnings.filterwarnings("ignore", module=r"lightning\..*")
        warnings.filterwarnings("ignore", message=r".*(IterableDataset|num_workers|tensorboardX|LeafSpec).*")

    def __exit__(self, *error: Any) -> None:
        self.caught.__exit__(*error)
        for name, level in self.levels.items():
            logging.getLogger(name).setLevel(level)
