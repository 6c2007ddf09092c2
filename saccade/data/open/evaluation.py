"""The part of a data set that a model is evaluated on."""

import os
from pathlib import Path
from typing import Any, NamedTuple

from saccade.data.open import open_split, open_train_and_val
from saccade.data.open.splits import EMBEDDED_IMAGES, EMBEDDED_VIDEOS, EVAL_NAMES, TRAIN_NAMES, Finder


class TrainingData(NamedTuple):
    """What a model was trained on, and what was held out."""

    path: str
    val_path: str | None
    val_fraction: float
    seed: int
    limit: int | None

    def is_at(self, path: str | os.PathLike) -> bool:
        """Whether another path names the same place; embedded sets by their name."""
        return self.path == str(path) or Path(self.path).resolve() == Path(path).resolve()


class EvaluationData(NamedTuple):
    """The part of a data set that is evaluated."""

    source: Any
    split: str  # its name, for people
    trained_on: bool  # whether the model was trained on these images


def open_held_out(
    data: str | os.PathLike,
    split: str | None,
    classes: list[str] | None,
    find: Finder,
    training: TrainingData | None = None,
) -> EvaluationData:
    """Open the requested split, else the evaluation split, else what training on the same data held out."""
    path = str(data) if str(data) in (EMBEDDED_IMAGES, EMBEDDED_VIDEOS) else Path(data)
    names = list(find(path))
    held_out = next((name for name in EVAL_NAMES if name in names), None)
    same = training if training is not None and training.is_at(data) else None
    if held_out is None and same is not None and not same.val_path:
        train_name = next((name for name in TRAIN_NAMES if name in names), "train")
        if split in (None, "val", train_name):  # the parts that training made of the data
            fraction = same.val_fraction
            parts = open_train_and_val(path, None, fraction, same.seed, find, same.limit)
            if split == train_name:
                return EvaluationData(parts[0], f"the {1 - fraction:.0%} that the model was trained on", True)
            return EvaluationData(parts[1], f"the {fraction:.0%} that training held out", False)
    name = split or held_out or names[0]
    trained_on = same is not None and (name in TRAIN_NAMES or (name == names[0] and held_out is None))
    return EvaluationData(open_split(path, split, classes, find), name, trained_on)
