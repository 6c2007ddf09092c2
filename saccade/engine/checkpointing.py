"""Checkpoints and weights on disk, early stopping, and stopping on signals."""

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback

from saccade.engine.module import TrainingModule
from saccade.engine.recipe import Trainer
from saccade.models.card import Card, save_model

SAVE_MINUTES = 10  # between checkpoints, unless trainer.save_every is set
SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1")  # SIGUSR1: SLURM's warning before the time limit


class StoppedBySignal(Exception):
    """The run was stopped by a signal after its checkpoint was saved."""


def rank(metrics: dict[str, float], monitor: str) -> tuple[float, float]:
    """Return the sort key of metrics: the monitored one, then the lower loss; of equal ones the later is the best."""
    return metrics[monitor], -metrics.get("loss", 0.0)


class Checkpointer(Callback):
    """Write `last.ckpt` (the complete state), `last.safetensors` and `best.safetensors` (weights) atomically.

    Lightning's ModelCheckpoint cannot break ties, and its signal handlers stop within an optimizer step. On SIGINT,
    SIGTERM or SIGUSR1 this callback lets the step finish, saves and stops; a second SIGINT stops immediately.
    """

    def __init__(self, out: Path, card: Card, options: Trainer):
        self.out, self.card, self.save_every, self.early_stop = out, card, options.save_every, options.early_stop
        self.best: dict[str, float] = {}  # metrics and step of best.safetensors
        self.saved_at, self.received = time.monotonic(), 0  # received: number of a signal

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Replace Lightning's handlers, which broadcast out of order; at the end it restores the previous ones."""
        if threading.current_thread() is threading.main_thread():
            for name in SIGNALS:
                if hasattr(signal, name):
                    signal.signal(getattr(signal, name), self.handle)

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if pl_module.micro_batch:
            return
        steps, alone = pl_module.clock.steps, trainer.world_size == 1
        if self.save_every:
            due = steps % self.save_every == 0
        else:  # the clocks of processes differ: rank 0 decides, every 100 steps
            due = time.monotonic() - self.saved_at > 60 * SAVE_MINUTES
            due = due if alone else steps % 100 == 0 and trainer.strategy.broadcast(due)
        if due and not pl_module.validation_pending:  # else a checkpoint follows the validation
            self.save(trainer, pl_module)
        stop = bool(self.received)
        if not alone:  # synchronise every 10 steps only, as that stalls the GPU
            stop = steps % 10 == 0 and trainer.strategy.reduce_boolean_decision(stop, all=False)
        if stop:
            self.stop(trainer, pl_module)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self.received and trainer.world_size == 1:
            self.stop(trainer, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.check_weights()
        metrics = {"step": pl_module.clock.steps, **pl_module.validation}
        if not self.best or rank(metrics, pl_module.monitor) >= rank(self.best, pl_module.monitor):
            self.best = metrics
            self.save_weights(trainer, pl_module, "best.safetensors")
        without_progress = (pl_module.clock.steps - self.best["step"]) / pl_module.stream.interval
        pl_module.clock.stopped = self.early_stop is not None and without_progress >= self.early_stop
        self.save(trainer, pl_module)

    def stop(self, trainer: Any, module: TrainingModule) -> None:
        self.save(trainer, module)
        raise StoppedBySignal(signal.Signals(self.received).name if self.received else "another process")

    def save(self, trainer: Any, module: TrainingModule) -> None:
        """Write a temporary file and rename it, so that a crash leaves the previous checkpoint intact."""
        module.check_weights()
        temporary = self.out / ".last.ckpt.new"
        trainer.save_checkpoint(temporary)
        if trainer.is_global_zero:
            os.replace(temporary, self.out / "last.ckpt")
        self.save_weights(trainer, module, "last.safetensors")
        self.saved_at = time.monotonic()

    def save_weights(self, trainer: Any, module: TrainingModule, name: str) -> None:
        """Save the weights of the complete model, gathered from all processes if they are sharded."""
        prefix = "model." if module.ema is None else "ema.module."
        state_dict = trainer.strategy.lightning_module_state_dict()
        if trainer.is_global_zero:
            weights = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
            save_model(module.eval_model, self.out / name, self.card, weights, step=str(module.clock.steps))
