"""Metrics on disk and progress on the terminal, on top of Lightning's loggers and progress bar."""

import csv
import sys
import time
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, loggers
from lightning.pytorch.callbacks import RichProgressBar

from saccade.engine.module import TrainingModule
from saccade.engine.results import METRIC_NAMES

LOGGERS = {"tensorboard": "pip install 'saccade[train]'", "wandb": "pip install wandb", "mlflow": "pip install mlflow"}


def check_logger(name: str) -> None:
    """Raise before training starts if the package of trainer.logger is not installed."""
    if name in LOGGERS and find_spec(name) is None:
        raise ImportError(
            f"trainer.logger={name} needs {name}, which is not installed. Run {LOGGERS[name]}, or use csv."
        )


def make_logger(name: str, out: Path, steps: int) -> Any:
    """Return Lightning's logger for a run resumed at `steps`; None for "csv", and for "auto" without TensorBoard."""
    if name == "tensorboard" or (name == "auto" and find_spec("tensorboard")):
        return loggers.TensorBoardLogger(out, "", "tensorboard", purge_step=steps + 1 if steps else None)
    if name == "wandb":
        return loggers.WandbLogger(out.name, out, id=out.name, resume="allow", project="saccade")
    if name == "mlflow":
        return loggers.MLFlowLogger("saccade", out.name, save_dir=str(out / "mlruns"))
    return None


class MetricsLog(Callback):
    """Write `metrics.csv` and pass it to a logger: one row per `log_every` optimizer steps and one per validation.

    Must precede the `Checkpointer`, so that a checkpoint contains the number of rows written up to it. A resumed run
    drops later rows and writes them again: no row is lost or duplicated, whenever the run was killed.
    """

    def __init__(self, out: Path):
        self.file = out / "metrics.csv"
        self.rows: list[dict[str, Any]] = []
        self.resumed_rows: int | None = None  # number of rows in the checkpoint that the run resumes from
        self.columns: list[str] = []
        self.last_row: tuple[float, int] | None = None  # time and step, for the throughput
        self.logger: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"rows": len(self.rows)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.resumed_rows = state_dict["rows"]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # not earlier: fsdp2 loads checkpoints after setup
        steps = pl_module.clock.steps  # 0, or the step of the checkpoint
        self.rows = [row for row in read_rows(self.file) if row["step"] <= steps][: self.resumed_rows]
        metrics = [f"train_{name}" for name in pl_module.train_metrics]
        metrics += [f"val_{name}" for name in pl_module.val_metrics]
        self.columns = ["step", "epoch", "lr", *metrics, "images_per_s", "seconds"]
        if trainer.is_global_zero:
            self.append(self.rows, "w")
            self.logger = make_logger(pl_module.recipe.trainer.logger, self.file.parent, steps)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        clock = pl_module.clock
        if self.last_row is None:
            self.last_row = (time.monotonic(), clock.steps)
        due = clock.steps % pl_module.recipe.trainer.log_every == 0 or pl_module.validation_pending
        if due and not pl_module.micro_batch and (metrics := pl_module.mean_train_metrics()):
            values = {f"train_{key}": value for key, value in metrics.items()}
            values["lr"] = max(group["lr"] for group in trainer.optimizers[0].param_groups)
            (before, steps), self.last_row = self.last_row, (time.monotonic(), clock.steps)
            if clock.steps > steps:
                images = (clock.steps - steps) * pl_module.recipe.batch_size
                values["images_per_s"] = images / (self.last_row[0] - before)
            self.write(pl_module, values)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.last_row = None

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.write(pl_module, {f"val_{key}": value for key, value in pl_module.validation.items()})

    def write(self, module: TrainingModule, values: dict[str, float]) -> None:
        clock = module.clock
        row = {"step": clock.steps, "epoch": round(module.epoch, 4), "seconds": round(clock.elapsed(), 2)}
        row |= {key: float(f"{value:.6g}") for key, value in values.items()}
        self.rows.append(row)
        if module.trainer.is_global_zero:
            self.append([row])
            if self.logger is not None:
                self.logger.log_metrics(values, clock.steps)
                self.logger.save()

    def append(self, rows: list[dict[str, Any]], mode: str = "a") -> None:
        with open(self.file, mode, newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            if mode == "w":
                writer.writeheader()
            writer.writerows(rows)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self.logger is not None:
            self.logger.finalize("success")


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.csv without empty cells; a last line truncated by a crash is dropped."""
    if not file.is_file():
        return []
    rows = []
    with open(file, newline="") as handle:
        for row in csv.DictReader(handle):
            with suppress(TypeError, ValueError, KeyError):
                values = {key: float(value) for key, value in row.items() if key and value}
                rows.append(values | {"step": int(values["step"])})
    return rows


class ProgressBar(RichProgressBar):
    """Lightning's bar with epoch, loss, throughput and time left; one line per validation without a terminal."""

    def __init__(self):
        super().__init__(refresh_rate=10, console_kwargs={"stderr": True})
        self.status, self.refreshed_at = {}, 0.0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not sys.stderr.isatty():
            self.disable()

    @property
    def total_train_batches(self) -> int:
        module: Any = self.trainer.lightning_module
        return module.stream.steps_left() * module.recipe.trainer.accumulate

    def configure_columns(self, trainer: Any) -> list:
        return super().configure_columns(trainer)[:3]  # description, bar, batches; times are in the metrics

    def _get_train_description(self, current_epoch: int) -> str:
        return "training"

    def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
        now = time.monotonic()
        if not self.status or now - self.refreshed_at > 0.5 or trainer.validating:  # reading a loss synchronises a GPU
            self.status, self.refreshed_at = status(pl_module), now
        return self.status

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_validation_end(trainer, pl_module)
        if trainer.is_global_zero and not sys.stderr.isatty():
            line = " · ".join(f"{key} {value}" for key, value in status(pl_module).items())
            print(f"{100 * pl_module.clock.progress:.0f} % · {line}", file=sys.stderr, flush=True)


def status(module: TrainingModule) -> dict[str, str]:
    """Return epoch, loss, throughput, time left and validation metrics, as texts."""
    clock, validation = module.clock, module.validation
    texts = {"epoch": f"{module.epoch:.2f}/{module.recipe.epochs}"}
    if module.last_loss is not None:
        texts["loss"] = f"{float(module.last_loss):.3f}"
    if speed := clock.images_per_second(module.recipe.batch_size):
        texts["images/s"] = f"{speed:,.0f}"
    if clock.progress < 1 and (seconds := clock.seconds_left()):
        texts["left"] = str(timedelta(seconds=int(seconds)))
    if "loss" in validation:
        texts["val loss"] = f"{validation['loss']:.3f}"
    if validation:
        texts[METRIC_NAMES[module.monitor]] = f"{validation[module.monitor]:.2f} %"
    return texts
