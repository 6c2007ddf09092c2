"""What happens around the updates: states and weights on disk, logs, the progress bar, signals."""

import csv
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from saccade._extras import require
from saccade.engine.module import Training
from saccade.engine.results import METRIC_NAMES


class History(Callback):
    """`metrics.csv` and TensorBoard: one row every `log_every` updates and one a validation.

    Stands before the `Keeper`, so that a state knows how many rows were written up to it. A run that goes on from it
    drops what came later, and writes that again: none is lost and none is there twice, whenever the run was killed.
    """

    def __init__(self, out: Path, tensorboard: bool = True):
        self.file, self.tensorboard = out / "metrics.csv", tensorboard
        self.rows: list[dict[str, Any]] = []
        self.known: int | None = None  # rows of the state the run goes on from
        self.columns: list[str] = []
        self.marked: tuple[float, int] | None = None
        self.board: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"rows": len(self.rows)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.known = state_dict["rows"]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        steps = pl_module.clock.steps  # 0, or where a resumed run stands
        self.rows = [row for row in read_rows(self.file) if row["step"] <= steps][: self.known]
        figures = [f"train_{name}" for name in pl_module.trained] + [f"val_{name}" for name in pl_module.validated]
        self.columns = ["step", "epoch", "lr", *figures, "images_per_s", "seconds"]
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
            self.board = SummaryWriter(str(self.file.parent / "tensorboard"), purge_step=steps + 1 if steps else None)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        clock = pl_module.clock
        if self.marked is None:
            self.marked = (time.monotonic(), clock.steps)
        due = clock.steps % pl_module.recipe.trainer.log_every == 0 or pl_module.owes_validation
        if not pl_module.part and due:
            self.write_training(trainer, pl_module)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.marked = None

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.write(trainer, pl_module, {f"val_{key}": value for key, value in pl_module.validation.items()})

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self.board is not None:
            self.board.close()

    def write_training(self, trainer: Any, module: Training) -> None:
        averages = module.train_averages()
        if averages is None:
            return
        values = {f"train_{key}": value for key, value in averages.items()}
        values["lr"] = max(group["lr"] for group in trainer.optimizers[0].param_groups)
        now, steps = time.monotonic(), module.clock.steps
        if self.marked is not None and steps > self.marked[1]:
            values["images_per_s"] = (steps - self.marked[1]) * module.recipe.batch_size / (now - self.marked[0])
        self.marked = (now, steps)
        self.write(trainer, module, values)

    def write(self, trainer: Any, module: Training, values: dict[str, float]) -> None:
        clock = module.clock
        per_epoch = clock.total / module.recipe.epochs
        row = {"step": clock.steps, "epoch": round(clock.steps / per_epoch, 4), "seconds": round(clock.elapsed(), 2)}
        row |= {key: float(f"{value:.6g}") for key, value in values.items()}
        self.rows.append(row)
        if not trainer.is_global_zero:
            return
        with open(self.file, "a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow(row)
        if self.board is not None:
            for key, value in values.items():
                self.board.add_scalar(key, value, clock.steps)
            self.board.flush()


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.csv, empty cells left out; a last line cut off by a crash is dropped."""
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


class Bar(Callback):
    """Progress with throughput, time left and metrics: a live bar on a terminal, a line a validation elsewhere."""

    def __init__(self, every: float = 0.5):
        self.every, self.shown = every, 0.0
        self.live: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        progress = require("rich.progress", "train")
        console = require("rich.console", "train").Console(stderr=True)
        if not trainer.is_global_zero or not console.is_terminal:
            return
        self.live = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.TextColumn("{task.fields[facts]}"),
            console=console,
        )
        self.live.start()
        self.task = self.live.add_task("training", total=1.0, facts="")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        now = time.monotonic()
        if self.live is not None and now - self.shown > self.every:
            self.shown = now
            self.live.update(self.task, completed=pl_module.clock.share, facts=describe(pl_module))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero and self.live is None:
            import sys

            share = f"{100 * pl_module.clock.share:.0f} %"
            print(f"{share} · update {pl_module.clock.steps} · {describe(pl_module)}", file=sys.stderr, flush=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)


def describe(module: Training) -> str:
    """What a person waiting wants to know."""
    clock, validation = module.clock, module.validation
    speed = clock.images_per_second(module.recipe.batch_size)
    facts = [f"{speed:,.0f} images/s"] if speed else []
    if speed and clock.share < 1:
        left = clock.seconds_left()
        days, rest = divmod(int(left), 86400)
        facts.append(f"{f'{days} d ' if days else ''}{time.strftime('%H:%M:%S', time.gmtime(rest))} left")
    if validation:
        if "loss" in validation:
            facts.append(f"val loss {validation['loss']:.3f}")
        facts.append(f"{METRIC_NAMES[module.score]} {validation[module.score]:.2f} %")
    return " · ".join(facts)
