"""Metrics on disk and progress on the terminal."""

import csv
import sys
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from saccade._extras import require
from saccade.engine.module import TrainingModule
from saccade.engine.results import METRIC_NAMES


class MetricsLog(Callback):
    """Write `metrics.csv` and TensorBoard: one row every `log_every` optimizer steps and one per validation.

    Must precede the `Checkpointer`, so that a checkpoint contains the number of rows written up to it. A resumed run
    drops later rows and writes them again: no row is lost or duplicated, whenever the run was killed.
    """

    def __init__(self, out: Path, tensorboard: bool = True):
        self.file, self.tensorboard = out / "metrics.csv", tensorboard
        self.rows: list[dict[str, Any]] = []
        self.resumed_rows: int | None = None  # number of rows in the checkpoint that the run resumes from
        self.columns: list[str] = []
        self.last_row: tuple[float, int] | None = None  # time and step, for the throughput
        self.writer: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"rows": len(self.rows)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.resumed_rows = state_dict["rows"]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        steps = pl_module.clock.steps  # 0, or the step of the checkpoint
        self.rows = [row for row in read_rows(self.file) if row["step"] <= steps][: self.resumed_rows]
        metrics = [f"train_{name}" for name in pl_module.train_metrics]
        metrics += [f"val_{name}" for name in pl_module.val_metrics]
        self.columns = ["step", "epoch", "lr", *metrics, "images_per_s", "seconds"]
        if not trainer.is_global_zero:
            return
        with open(self.file, "w", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(self.rows)
        if self.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                return
            self.writer = SummaryWriter(str(self.file.parent / "tensorboard"), purge_step=steps + 1 if steps else None)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        clock = pl_module.clock
        if self.last_row is None:
            self.last_row = (time.monotonic(), clock.steps)
        due = clock.steps % pl_module.recipe.trainer.log_every == 0 or pl_module.validation_pending
        if not pl_module.micro_batch and due:
            self.write_training(trainer, pl_module)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.last_row = None

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.write(trainer, pl_module, {f"val_{key}": value for key, value in pl_module.validation.items()})

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self.writer is not None:
            self.writer.close()

    def write_training(self, trainer: Any, module: TrainingModule) -> None:
        metrics = module.mean_train_metrics()
        if metrics is None:
            return
        values = {f"train_{key}": value for key, value in metrics.items()}
        values["lr"] = max(group["lr"] for group in trainer.optimizers[0].param_groups)
        now, steps = time.monotonic(), module.clock.steps
        if self.last_row is not None and steps > self.last_row[1]:
            values["images_per_s"] = (steps - self.last_row[1]) * module.recipe.batch_size / (now - self.last_row[0])
        self.last_row = (now, steps)
        self.write(trainer, module, values)

    def write(self, trainer: Any, module: TrainingModule, values: dict[str, float]) -> None:
        clock = module.clock
        per_epoch = clock.total_steps / module.recipe.epochs
        row = {"step": clock.steps, "epoch": round(clock.steps / per_epoch, 4), "seconds": round(clock.elapsed(), 2)}
        row |= {key: float(f"{value:.6g}") for key, value in values.items()}
        self.rows.append(row)
        if not trainer.is_global_zero:
            return
        with open(self.file, "a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow(row)
        if self.writer is not None:
            for key, value in values.items():
                self.writer.add_scalar(key, value, clock.steps)
            self.writer.flush()


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.csv without empty cells; a last line truncated by a crash is dropped."""
    if not file.is_file():
        return []
    rows = []
    with open(file, newline="") as handle:
        for row in csv.DictReader(handle):
            try:
                values = {key: float(value) for key, value in row.items() if key and value}
                rows.append(values | {"step": int(values["step"])})
            except (TypeError, ValueError, KeyError):
                continue
    return rows


class ProgressBar(Callback):
    """Show throughput, time left and metrics: a live bar on a terminal, one line per validation elsewhere."""

    def __init__(self, interval: float = 0.5):
        self.interval, self.refreshed_at = interval, 0.0  # seconds
        self.bar: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        progress = require("rich.progress", "train")
        console = require("rich.console", "train").Console(stderr=True)
        if not trainer.is_global_zero or not console.is_terminal:
            return
        self.bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.TextColumn("{task.fields[status]}"),
            console=console,
        )
        self.bar.start()
        self.bar_task = self.bar.add_task("training", total=1.0, status="")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        now = time.monotonic()
        if self.bar is not None and now - self.refreshed_at > self.interval:
            self.refreshed_at = now
            self.bar.update(self.bar_task, completed=pl_module.clock.progress, status=format_status(pl_module))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero and self.bar is None:
            clock = pl_module.clock
            line = f"{100 * clock.progress:.0f} % · step {clock.steps} · {format_status(pl_module)}"
            print(line, file=sys.stderr, flush=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)


def format_status(module: TrainingModule) -> str:
    """Return throughput, time left and validation metrics as one line."""
    clock, validation = module.clock, module.validation
    speed = clock.images_per_second(module.recipe.batch_size)
    parts = [f"{speed:,.0f} images/s"] if speed else []
    if speed and clock.progress < 1:
        days, seconds = divmod(int(clock.seconds_left()), 86400)
        parts.append(f"{f'{days} d ' if days else ''}{time.strftime('%H:%M:%S', time.gmtime(seconds))} left")
    if validation:
        if "loss" in validation:
            parts.append(f"val loss {validation['loss']:.3f}")
        parts.append(f"{METRIC_NAMES[module.monitor]} {validation[module.monitor]:.2f} %")
    return " · ".join(parts)
