"""What happens around the updates: states and weights on disk, logs, the progress bar, signals."""

import csv
import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from saccade._extras import require
from saccade.engine.module import Training
from saccade.engine.results import METRIC_NAMES
from saccade.models.card import Card, save_model

MINUTES = 10  # between states, when nothing else asks for one


class Stopped(Exception):
    """A signal asked the run to stop; its state is saved."""


class Keeper(Callback):
    """`last.ckpt` (everything needed to go on), `last.safetensors` and `best.safetensors` (weights); all atomic."""

    def __init__(self, out: Path, card: Card, every: int | None = None):
        self.out, self.card, self.every = out, card, every
        self.best: dict[str, float] = {}
        self.saved = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if pl_module.part or pl_module.owes_validation:  # behind it there will be a state
            return
        steps = pl_module.clock.steps
        due = steps % self.every == 0 if self.every else time.monotonic() - self.saved > 60 * MINUTES
        if not self.every and trainer.world_size > 1:  # the watches of the processes differ: the first one's counts
            due = trainer.strategy.broadcast(due) if steps % 100 == 0 else False
        if due:
            self.save(trainer, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.sanity_checking:
            return
        pl_module.check_weights()
        found = {"step": pl_module.clock.steps, **pl_module.validation}
        better = not self.best or found[pl_module.score] > self.best[pl_module.score]
        if better:
            self.best = found
            self.save_weights(trainer, pl_module, "best.safetensors")
        self.save(trainer, pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException):  # raised by Lightning on every process at the same update
            self.save(trainer, pl_module)

    def save(self, trainer: Any, module: Training) -> None:
        """The state first under another name, then in place: a crash leaves the old one whole."""
        module.check_weights()
        fresh = self.out / ".last.ckpt.new"
        trainer.save_checkpoint(fresh)
        if trainer.is_global_zero:
            os.replace(fresh, self.out / "last.ckpt")
        self.save_weights(trainer, module, "last.safetensors")
        self.saved = time.monotonic()

    def save_weights(self, trainer: Any, module: Training, name: str) -> None:
        """Of the whole model, gathered from all processes where each holds only a part."""
        prefix = "model." if module.ema is None else "ema.module."
        found = trainer.strategy.lightning_module_state_dict()
        if trainer.is_global_zero:
            weights = {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}
            save_model(module.kept, self.out / name, self.card, weights, step=str(module.clock.steps))


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


class Signals(Callback):
    """Ctrl-C, SIGTERM, SIGUSR1 (a cluster's warning): finish the update, save, stop. A second Ctrl-C stops at once."""

    NAMES = ("SIGINT", "SIGTERM", "SIGUSR1")

    def __init__(self, keeper: Keeper):
        self.keeper, self.received = keeper, 0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        import threading

        if threading.current_thread() is threading.main_thread():
            for number in (getattr(signal, name) for name in self.NAMES if hasattr(signal, name)):
                self.before[number] = signal.signal(number, self.note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def note(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if pl_module.part or (trainer.world_size > 1 and pl_module.clock.steps % 10):
            return  # processes agree every tenth update
        received = bool(self.received)
        if trainer.world_size > 1:  # asking the others makes the device wait
            received = trainer.strategy.reduce_boolean_decision(received, all=False)
        if received:
            self.keeper.save(trainer, pl_module)
            raise Stopped(signal.Signals(self.received).name if self.received else "another process")

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self.received and trainer.world_size == 1:
            self.keeper.save(trainer, pl_module)
            raise Stopped(signal.Signals(self.received).name)
