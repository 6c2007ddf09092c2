"""Train a recipe into a folder: weights, checkpoints, metrics and a report."""

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

from saccade.engine.checkpointing import Checkpointer, SignalHandler, StoppedBySignal
from saccade.engine.clock import Clock
from saccade.engine.loaders import Sources
from saccade.engine.logs import MetricsLog, ProgressBar
from saccade.engine.module import TrainingModule, TrainingSetup
from saccade.engine.recipe import Recipe, RecipeError, load_recipe, to_dict, to_yaml
from saccade.engine.report import write_report
from saccade.engine.results import describe_run, write_json, write_text
from saccade.engine.sync_batchnorm import BatchNormSync
from saccade.engine.tasks.classify import ClassificationModule
from saccade.engine.tasks.detect import DetectionModule
from saccade.engine.tasks.segment import SegmentationModule
from saccade.tasks.open import open_task_model

TASKS: dict[str, type[TrainingModule]] = {
    "classification": ClassificationModule,
    "segmentation": SegmentationModule,
    "detection": DetectionModule,
    "video": ClassificationModule,
}

# Keys that a resumed run may not change, because its steps would differ from those of the first part.
FIXED = ("task", "model.", "epochs", "batch_size", "seed", "data.scenes", "data.val_fraction", "trainer.accumulate")


class Run(NamedTuple):
    """A finished or stopped run."""

    out: Path
    result: dict[str, Any]  # contents of result.json
    model: nn.Module  # with the weights of last.safetensors
    stopped: str = ""  # name of the signal that stopped it


@contextmanager
def preserve_torch_settings() -> Iterator[None]:
    """Restore the process-wide settings for deterministic algorithms and cuDNN autotuning on exit."""
    exact, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn
    benchmark, deterministic = cudnn.benchmark, cudnn.deterministic
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(exact, warn_only=warn)
        cudnn.benchmark, cudnn.deterministic = benchmark, deterministic


@preserve_torch_settings()
def train(
    recipe: Recipe,
    out: str | Path,
    resume: bool = False,
    device: str | None = None,
    command: str = "",
    progress: bool = True,
) -> Run:
    """Train `recipe` into the folder `out`; with `resume`, continue from its last checkpoint if there is one.

    `device` overrides the recipe's accelerator: "cpu", "cuda", "cuda:1". `command` is written to result.json. In a
    distributed run only process 0 returns a result.
    """
    started = time.monotonic()
    out = Path(out)
    checkpoint = prepare_folder(out, recipe, resume)
    model, card, sources, preprocess = assemble(recipe)
    steps = steps_per_epoch(recipe, sources)
    clock = Clock(recipe.epochs * steps, recipe.trainer.max_minutes, started)
    module = TASKS[recipe.task](model, recipe, sources, preprocess, clock, str(out))
    if recipe.trainer.compile:
        module.compile_model(recipe.trainer.compile_mode)
    checkpointer, log = Checkpointer(out, card, recipe.trainer.save_every), MetricsLog(out)
    with quiet_lightning(), SignalHandler(checkpointer) as signals:
        callbacks = [log, checkpointer, signals] + ([ProgressBar()] if progress else [])
        trainer = Trainer(**trainer_options(recipe, device), callbacks=callbacks)
        stopped = ""
        try:
            trainer.fit(module, ckpt_path=checkpoint, weights_only=True)
        except StoppedBySignal as signal:
            stopped = str(signal)
        except SIGTERMException:  # Lightning handled the signal first, after a validation; the checkpoint is saved
            stopped = "SIGTERM"
    if not trainer.is_global_zero:
        return Run(out, {}, model)
    if stopped:
        return Run(out, {"stopped": stopped, "step": clock.steps}, module.eval_model, stopped)
    final, final_device = open_task_model(out / "last.safetensors")[0], trainer.strategy.root_device
    evaluation = module.evaluate(final, final_device)
    result = describe_run(final, module, evaluation, checkpointer.best, command, final_device)
    write_json(out / "result.json", result)
    write_report(out / "report.html", result, log.rows, module.report_sections(final, evaluation), recipe)
    return Run(out, result, final)


def prepare_folder(out: Path, recipe: Recipe, resume: bool) -> Path | None:
    """Create the folder, save the resolved recipe and return the checkpoint to resume from, if there is one."""
    checkpoint, saved = out / "last.ckpt", out / "recipe.yaml"
    if checkpoint.exists() and not resume:
        raise RecipeError(f"{out} already contains a run. Continue it with --resume, or choose another --out.")
    if checkpoint.exists() and saved.exists():
        for key, before, now in differences(to_dict(load_recipe(saved)), to_dict(recipe)):
            if key.startswith(FIXED):
                raise RecipeError(f"a resumed run cannot change {key}: it was {before!r} and is now {now!r}.")
            logging.getLogger(__name__).warning("resuming with %s=%r (was %r)", key, now, before)
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        write_text(saved, to_yaml(recipe))
    return checkpoint if checkpoint.exists() else None


def differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Return (key, before, now) of every value that differs."""
    changed = []
    for key in now:
        if isinstance(now[key], dict) and isinstance(before.get(key), dict) and key != "kwargs":
            changed += differences(before[key], now[key], f"{prefix}{key}.")
        elif before.get(key) != now[key]:
            changed.append((f"{prefix}{key}", before.get(key), now[key]))
    return changed


def assemble(recipe: Recipe) -> TrainingSetup:
    """Create model, card, data and preprocessing for the recipe's task."""
    setup = TASKS[recipe.task].assemble(recipe)
    if recipe.trainer.channels_last:
        setup.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if recipe.trainer.grad_checkpointing:
        setup.model.set_grad_checkpointing()  # type: ignore[operator]
    return setup


def steps_per_epoch(recipe: Recipe, sources: Sources) -> int:
    count = sources.train_count
    if recipe.batch_size > count:
        raise RecipeError(f"batch_size ({recipe.batch_size}) must not exceed the {count} training images. Lower it.")
    return count // recipe.batch_size


def trainer_options(recipe: Recipe, device: str | None) -> dict[str, Any]:
    """Return the keyword arguments of Lightning's Trainer."""
    options = recipe.trainer
    accelerator, devices = options.accelerator, options.devices
    if device is not None:
        kind, _, number = device.partition(":")
        accelerator = {"cuda": "gpu"}.get(kind, kind)
        if number:
            devices = [int(number)]
    kwargs: dict[str, Any] = {
        "accelerator": accelerator,
        "devices": devices,
        "num_nodes": options.num_nodes,
        "strategy": options.strategy,
        "precision": options.precision,
        "max_epochs": -1,  # the clock ends the run
        "accumulate_grad_batches": options.accumulate,
        "gradient_clip_val": recipe.optimizer.clip_grad,
        "deterministic": options.deterministic or None,
        # Detection has new shapes in every step, and cuDNN would autotune for each.
        "benchmark": not options.deterministic and recipe.task != "detection",
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    if options.sync_batchnorm:
        kwargs["plugins"] = [BatchNormSync(accelerator)]
    return kwargs


class quiet_lightning:
    """Hide Lightning's tips and warnings; errors still appear."""

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
