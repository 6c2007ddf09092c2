"""Checkpoints and weights on disk, and stopping on signals."""

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


class StoppedBySignal(Exception):
    """The run was stopped by a signal after its checkpoint was saved."""


def rank(metrics: dict[str, float], monitor: str) -> tuple[float, float]:
    """Return the sort key of metrics: the monitored one, then the lower loss; of equal ones the later is the best."""
    return metrics[monitor], -metrics.get("loss", 0.0)


class Checkpointer(Callback):
    """Write `last.ckpt` (the complete state), `last.safetensors` and `best.safetensors` (weights) atomically."""

    def __init__(self, out: Path, card: Card, options: Trainer):
        self.out, self.card, self.save_every, self.early_stop = out, card, options.save_every, options.early_stop
        self.best: dict[str, float] = {}  # metrics and step of best.safetensors
        self.saved_at = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if pl_module.micro_batch or pl_module.validation_pending:  # a checkpoint follows the validation
            return
        steps = pl_module.clock.steps
        if self.save_every:
            due = steps % self.save_every == 0
        else:
            due = time.monotonic() - self.saved_at > 60 * SAVE_MINUTES
            if trainer.world_size > 1:  # the clocks of the processes differ: rank 0 decides, every 100 steps
                due = trainer.strategy.broadcast(due) if steps % 100 == 0 else False
        if due:
            self.save(trainer, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.sanity_checking:
            return
        pl_module.check_weights()
        metrics = {"step": pl_module.clock.steps, **pl_module.validation}
        if not self.best or rank(metrics, pl_module.monitor) >= rank(self.best, pl_module.monitor):
            self.best = metrics
            self.save_weights(trainer, pl_module, "best.safetensors")
        without_progress = (pl_module.clock.steps - self.best["step"]) / pl_module.stream.interval
        pl_module.clock.stopped = self.early_stop is not None and without_progress >= self.early_stop
        self.save(trainer, pl_module)

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


class SignalHandler(Callback):
    """On SIGINT, SIGTERM or SIGUSR1: finish the step, save, stop. A second SIGINT stops immediately."""

    SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1")  # SIGUSR1: SLURM's warning before the time limit

    def __init__(self, checkpointer: Checkpointer):
        self.checkpointer, self.received = checkpointer, 0
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "SignalHandler":
        self.previous = self.install()
        return self

    def install(self) -> dict[int, Any]:
        """Set the handlers and return the previous ones."""
        if threading.current_thread() is not threading.main_thread():
            return {}
        signals = [getattr(signal, name) for name in self.SIGNALS if hasattr(signal, name)]
        return {number: signal.signal(number, self.handle) for number in signals}

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.install()  # again: Lightning's handler of SIGTERM broadcasts, out of order with other collectives

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if pl_module.micro_batch or (trainer.world_size > 1 and pl_module.clock.steps % 10):
            return  # several processes synchronise every 10 steps only, as that stalls the GPU
        received = bool(self.received)
        if trainer.world_size > 1:
            received = trainer.strategy.reduce_boolean_decision(received, all=False)
        if received:
            self.stop(trainer, pl_module)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self.received and trainer.world_size == 1:
            self.stop(trainer, pl_module)

    def stop(self, trainer: Any, module: TrainingModule) -> None:
        self.checkpointer.save(trainer, module)
        raise StoppedBySignal(signal.Signals(self.received).name if self.received else "another process")
