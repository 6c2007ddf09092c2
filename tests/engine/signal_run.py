"""Run `saccade train`, sending a signal to its process group at an exact point: … SIGNAL POINT STEP ARGUMENTS."""

import os
import signal
import subprocess
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


def send_signal_at(number: signal.Signals, point: str, step: int) -> None:
    owner, name = POINTS[point]
    original = getattr(owner, name)

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        module = self.lightning_module if isinstance(self, Trainer) else self
        if module.clock.steps == step:
            # From another process and to the group, as `timeout` and schedulers do: loader processes receive it too
            subprocess.run(["kill", f"-{number.value}", "--", f"-{os.getpgid(0)}"], check=True, start_new_session=True)
        return result

    setattr(owner, name, patched)


if __name__ == "__main__":
    send_signal_at(signal.Signals[sys.argv[1]], sys.argv[2], int(sys.argv[3]))
    sys.exit(main(["train", *sys.argv[4:]]))
