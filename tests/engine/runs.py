"""Short runs for the tests: a model of a few thousand parameters on a few scenes."""

import csv
from pathlib import Path

from saccade.engine.recipe import Recipe, load_recipe

TINY = "model.kwargs={dims: [8, 16, 16, 16], depths: [1, 1, 1, 1], heads: [1, 1, 1, 1], projection: 16}"
SMALL = ["data.path=scenes", "data.scenes=60", "data.image_size=32", "data.workers=0", "batch_size=20", "epochs=2",
         "trainer.log_every=1", "trainer.accelerator=cpu", "trainer.deterministic=true"]  # fmt: skip

# Everything that draws random numbers or has state.
RANDOM = ["augment.auto_augment=rand-m9-n2-mstd0.5", "augment.mixup=0.8", "augment.cutmix=1.0", "augment.erase=0.25",
          "augment.mix_prob=0.8", "regularize.drop_path=0.2", "regularize.dropout=0.1", "ema.decay=0.9",
          "optimizer.clip_grad=1.0", "trainer.accumulate=2"]  # fmt: skip


def rows(out: Path) -> list[dict[str, str]]:
    """Return the rows of metrics.csv."""
    with open(out / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def recipe(*changes: str) -> Recipe:
    return load_recipe(None, [TINY, *SMALL, *changes])


def arguments(*changes: str) -> list[str]:
    """Return the same recipe as arguments of `saccade train`."""
    return ["--model", "svit_nano", *(word for change in (TINY, *SMALL, *changes) for word in ("--set", change))]
