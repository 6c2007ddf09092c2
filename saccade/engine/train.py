"""Train a recipe, or a model by name, into a folder: weights, checkpoints, metrics and a report."""

import atexit
import json
import logging
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.strategies import ModelParallelStrategy
from timm.layers import convert_sync_batchnorm
from torch import nn

from saccade._files import write_file, write_json
from saccade.benchmark.machine import best_time
from saccade.engine.checkpointing import Checkpointer, StoppedBySignal
from saccade.engine.clock import Clock
from saccade.engine.logs import MetricsLog, ProgressBar, check_logger
from saccade.engine.module import TrainingModule, TrainingSetup
from saccade.engine.recipe import Recipe, load_recipe, to_dict, to_yaml
from saccade.engine.report import task_sections, write_report
from saccade.engine.resolve import fit_to_data, resolve_recipe
from saccade.engine.results import describe_run
from saccade.engine.schedule import make_optimizer
from saccade.engine.tasks.align import AlignmentModule
from saccade.engine.tasks.classify import ClassificationModule
from saccade.engine.tasks.detect import DetectionModule
from saccade.engine.tasks.multi_label import MultiLabelModule
from saccade.engine.tasks.segment import SegmentationModule
from saccade.models.card import Preprocess
from saccade.tasks.classification import freeze_backbone
from saccade.tasks.load import load

TASKS: dict[str, type[TrainingModule]] = {
    "classification": ClassificationModule,
    "segmentation": SegmentationModule,
    "detection": DetectionModule,
    "video": ClassificationModule,
}


def module_of(recipe: Recipe) -> type[TrainingModule]:
    """Return the class that trains a recipe."""
    if recipe.data.multi_label:
        return MultiLabelModule
    return AlignmentModule if recipe.distill.features else TASKS[recipe.task]


# Keys that a resumed run may not change, because its steps would differ from those of the first part.
FIXED = ("task", "model.", "epochs", "batch_size", "seed", "data.scenes", "data.val_fraction", "trainer.accumulate")
_logger = logging.getLogger(__name__)


class Run(NamedTuple):
    """A finished or stopped run."""

    out: Path
    result: dict[str, Any]  # contents of result.json
    stopped: str = ""  # name of the signal that stopped it

    def __repr__(self) -> str:
        metrics = [f"{name}={value:.4g}" for name, value in self.metrics.items() if isinstance(value, float)]
        return f"Run({self.out}: {', '.join(metrics) or self.stopped})"

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of `weights` on the validation set, in percent."""
        return self.result.get("final", {})

    @property
    def weights(self) -> Path:
        """The weights file that `saccade.load(run.out)` opens."""
        return self.out / "best.safetensors"

    @property
    def model(self) -> nn.Module:
        """The model with `weights`, in evaluation mode, opened anew at each access."""
        return load(self.weights)


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
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    out: str | Path | None = None,
    *,
    model: str | None = None,
    head: str | None = None,
    data: str | Path | None = None,
    resume: bool = False,
    device: str | None = None,
    progress: bool = True,
    changes: Sequence[str] = (),
    command: str = "",
    **settings: Any,
) -> Run:
    """Train a recipe, or a model by name, into the folder `out`; what `saccade train` does.

    Without a recipe, a model with embedded or released weights is fine-tuned from them at their image size
    (`pretrained=False`: from scratch), and without `epochs` a small data set gets more of them.

    Args:
        recipe: a YAML file, the name of one under recipes/, or a `Recipe`; None with `model` or with `resume`.
        out: folder of the run, by default runs/MODEL_DATA.
        model, head, data: replace the recipe's.
        resume: continue from the folder's last checkpoint if there is one; a finished run continues with more `epochs`.
        device: overrides the recipe's accelerator: "cpu", "cuda", "cuda:1".
        changes: "key=value" as in `--set`, applied last.
        command: written to result.json.
        settings: epochs, batch, lr, size, pretrained, freeze, early_stop, limit, seed, or any top-level key of a
            recipe: optimizer={"lr": 5e-4}.

    In a distributed run only process 0 returns a result.

    Example:
        >>> run = saccade.train(model="svit_nano", data="scenes", out="runs/first", size=32, epochs=1, limit=64)
        >>> sorted(run.metrics)
        ['bad', 'calibration', 'count', 'loss', 'top1', 'top5']
        >>> run.weights.name, run.model.num_classes
        ('best.safetensors', 10)
    """
    started = time.monotonic()
    if recipe is None and not model and resume and out is not None:
        recipe = recipe_to_resume(Path(out))
    no_epochs = recipe is None and "epochs" not in settings and not any(text.startswith("epochs=") for text in changes)
    recipe = with_launcher(resolve_recipe(recipe, model, head, data, changes, settings))
    check_logger(recipe.trainer.logger)
    out = Path(out or default_folder(recipe))
    if (out / "last.ckpt").exists() and not resume:
        raise ValueError(f"{out} already contains a run. Continue it with --resume, or choose another --out.")
    session = set_up(recipe, out, device, no_epochs, started)
    module, log, checkpointer = session.module, session.log, session.checkpointer
    stopped = fit(session, progress)
    if stopped or not module.trainer.is_global_zero:
        return Run(out, {"stopped": stopped, "step": module.clock.steps} if stopped else {}, stopped)
    best, device_used = Run(out, {}).model, module.trainer.strategy.root_device
    evaluation = module.evaluate(best, device_used)
    result = describe_run(best, module, evaluation, checkpointer.best, command)
    write_json(out / "result.json", result)
    write_report(out / "report.html", result, log.rows, task_sections(module, best, evaluation), module.recipe)
    return Run(out, result)


def recipe_to_resume(out: Path) -> Path:
    """Return the recipe of the run in a folder."""
    recipe = out / "recipe.yaml"
    if not recipe.is_file():
        raise ValueError(
            f"expected a run to resume in {out}, got no recipe.yaml there. Name the run's folder in --out, or start it "
            "with a recipe or --model NAME."
        )
    return recipe


class Session(NamedTuple):
    """A run that is ready to train."""

    module: TrainingModule
    log: MetricsLog
    checkpointer: Checkpointer
    checkpoint: Path | None  # to resume from
    device: str | None


def set_up(
    recipe: Recipe, out: Path, device: str | None = None, no_epochs: bool = False, started: float | None = None
) -> Session:
    """Open the data, create the model and prepare the folder, where a checkpoint is resumed from."""
    network, card, sources, preprocess = assemble(recipe)
    recipe = fit_to_data(recipe, sources.train_count, no_epochs)
    if card.multi_label:
        recipe = replace(recipe, data=replace(recipe.data, multi_label=True))
    clock = Clock(recipe.epochs * (sources.train_count // recipe.batch_size), recipe.trainer.max_minutes, started)
    module = module_of(recipe)(network, recipe, sources, preprocess, clock, str(out))
    make_optimizer(network, recipe.optimizer, recipe.batch_size)  # raises for wrong options, before the folder is made
    checkpoint = prepare_folder(out, recipe)
    if recipe.trainer.compile:
        module.compile_model(recipe.trainer.compile_mode)
    warn_if_slow(network, preprocess, recipe, clock, device)
    return Session(module, MetricsLog(out), Checkpointer(out, card, recipe.trainer), checkpoint, device)


def fit(session: Session, progress: bool = False) -> str:
    """Train to the end of the recipe; returns the name of the signal that stopped the run, or ""."""
    with quiet_lightning():
        callbacks = [session.log, session.checkpointer] + ([ProgressBar()] if progress else [])
        options = trainer_options(session.module.recipe, session.device)
        trainer = Trainer(**options, callbacks=callbacks, enable_progress_bar=progress)
        if trainer.world_size > 1:
            atexit.register(close_process_group)
        try:
            trainer.fit(session.module, ckpt_path=session.checkpoint, weights_only=True)
        except StoppedBySignal as signal:
            return str(signal)
    return ""


def close_process_group() -> None:
    """Close the process group, if it is open.

    Lightning does so for NCCL only. A process that ends with an open gloo group is now and then aborted by the group's
    threads, and torchrun then ends process 0, which is still evaluating.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


@torch.inference_mode()
def warn_if_slow(model: Any, preprocess: Preprocess, recipe: Recipe, clock: Clock, device: str | None) -> None:
    """Warn of a run of more than an hour on a CPU, estimated as three forward passes per image (with backward)."""
    if (torch.cuda.is_available() and (device or recipe.trainer.accelerator) != "cpu") or recipe.trainer.max_minutes:
        return
    network = getattr(model, "backbone_model", model).eval()
    frames, size = (preprocess.frames,) if preprocess.frames > 1 else (), preprocess.size
    image = torch.zeros(1, 3, *frames, size, size)
    seconds = best_time(lambda: network(image), "cpu", repeats=1)
    network.train()
    hours = 3 * seconds * recipe.batch_size * clock.total_steps / 3600
    if hours > 1:
        _logger.warning(
            "this run takes about %.0f hours on this CPU: %d epochs of %d images. For a quick try use --limit N, "
            "--epochs N, a smaller --size, or --set trainer.max_minutes=N.",
            hours, recipe.epochs, recipe.batch_size * clock.total_steps // recipe.epochs,
        )  # fmt: skip


def with_launcher(recipe: Recipe) -> Recipe:
    """Return the recipe with the number of processes that torchrun has started."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return recipe
    local, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    return replace(recipe, trainer=replace(recipe.trainer, devices=local, num_nodes=world // local))


def default_folder(recipe: Recipe) -> Path:
    name = "+".join(filter(None, (recipe.model.name, recipe.model.head)))
    return Path("runs") / f"{name}_{Path(recipe.data.path).name}"


def prepare_folder(out: Path, recipe: Recipe) -> Path | None:
    """Create the folder, save the resolved recipe and return the checkpoint to resume from, if there is one."""
    checkpoint, saved = out / "last.ckpt", out / "recipe.yaml"
    if checkpoint.exists() and saved.exists():
        before = load_recipe(saved)
        extended = recipe.epochs > before.epochs and is_finished(out, before)
        for key, old, new in differences(to_dict(before), to_dict(recipe)):
            if key.startswith(FIXED) and not (key == "epochs" and extended):
                hint = " Only a finished run can be extended." if key == "epochs" else ""
                raise ValueError(f"a resumed run cannot change {key}: it was {old!r} and is now {new!r}.{hint}")
            _logger.warning("resuming with %s=%r (was %r)", key, new, old)
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        write_file(saved, to_yaml(recipe))
    return checkpoint if checkpoint.exists() else None


def is_finished(out: Path, recipe: Recipe) -> bool:
    """Return whether the folder has the result of all epochs of `recipe`."""
    file = out / "result.json"
    return file.is_file() and json.loads(file.read_text())["recipe"]["epochs"] == recipe.epochs


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
    setup = module_of(recipe).assemble(recipe)
    if recipe.trainer.channels_last and recipe.trainer.strategy != "fsdp2":  # which needs contiguous weights
        setup.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if recipe.trainer.grad_checkpointing:
        setup.model.set_grad_checkpointing()  # type: ignore[operator]
    if recipe.model.freeze:
        freeze_backbone(setup.model)
    return setup


class TimmSyncBatchNorm(LayerSync):
    """Convert batch norms with timm, because torch's conversion drops the activation of timm's fused layers."""

    def apply(self, model: nn.Module) -> nn.Module:
        return convert_sync_batchnorm(model)

    def revert(self, model: nn.Module) -> nn.Module:
        return model  # in evaluation mode a synchronised norm equals an ordinary one


def trainer_options(recipe: Recipe, device: str | None) -> dict[str, Any]:
    """Return the keyword arguments of Lightning's Trainer."""
    options = recipe.trainer
    accelerator, devices, strategy = options.accelerator, options.devices, options.strategy
    if device is not None:
        kind, _, number = device.partition(":")
        accelerator = {"cuda": "gpu"}.get(kind, kind)
        devices = [int(number)] if number else devices
    on_gpu = torch.cuda.is_available() and accelerator != "cpu"
    if options.sync_batchnorm and not on_gpu and devices not in (1, "auto"):
        raise ValueError("trainer.sync_batchnorm needs GPUs (torch.nn.SyncBatchNorm). Set it to false.")
    if strategy == "fsdp2":  # Lightning's defaults mean tensor parallelism
        world = int(options.devices) * options.num_nodes
        strategy = ModelParallelStrategy(world, tensor_parallel_size=1, save_distributed_checkpoint=False)
    return {
        "accelerator": accelerator,
        "devices": devices,
        "num_nodes": options.num_nodes,
        "strategy": strategy,
        "precision": options.precision,
        "plugins": [TimmSyncBatchNorm()] if options.sync_batchnorm and on_gpu else [],
        "max_epochs": -1,  # the clock ends the run
        "accumulate_grad_batches": options.accumulate,
        "gradient_clip_val": recipe.optimizer.clip_grad,
        "deterministic": options.deterministic or None,
        # Detection has new shapes in every step, and cuDNN would autotune for each.
        "benchmark": not options.deterministic and recipe.task != "detection",
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "logger": False,  # MetricsLog creates the logger, once the step of a resumed run is known
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Hide Lightning's tips and warnings; errors still appear."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\..*")
            warnings.filterwarnings("ignore", message=r".*(IterableDataset|num_workers|tensorboardX|LeafSpec).*")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
