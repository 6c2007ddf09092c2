"""Run `saccade train`, sending a signal to itself at an exact point: … signal_run SIGNAL POINT STEP ARGUMENTS."""

import os
import signal
import sys
from typing import Any

from lightning.pytorch import Trainer

from saccade.cli import main
from saccade.engine.module import TrainingModule
from saccade.engine.tasks.classify import ClassificationModule

POINTS = {
    "step": (TrainingModule, "optimizer_step"),  # after the optimizer step
    "validation": (ClassificationModule, "update_metrics"),  # after a validation batch
    "write": (Trainer, "save_checkpoint"),  # after writing the temporary file, before it is renamed
}


def send_signal_at(number: int, point: str, step: int) -> None:
    owner, name = POINTS[point]
    original = getattr(owner, name)

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        module = self.lightning_module if isinstance(self, Trainer) else self
        if module.clock.steps == step:
            os.kill(os.getpid(), number)
        return result

    setattr(owner, name, patched)


if __name__ == "__main__":
    send_signal_at(signal.Signals[sys.argv[1]], sys.argv[2], int(sys.argv[3]))
    sys.exit(main(["train", *sys.argv[4:]]))
