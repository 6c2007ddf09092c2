"""What happens around the updates: states and weights on disk, logs, the progress bar, signals."""

import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from saccade.engine.module import Training
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
