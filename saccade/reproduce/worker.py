"""One run in a process of its own: `python -m saccade.reproduce.worker FOLDER`.

FOLDER/spec.json says what to train; the result is written to the file that it names. A run that was stopped by a signal
exits with `STOPPED` and continues from its checkpoint when it is started again.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import saccade.models  # noqa: F401  (registers the models with timm)
from saccade._files import write_json
from saccade.benchmark import Case, measure
from saccade.data.loader import EvalLoader
from saccade.data.open import limited
from saccade.engine.loaders import open_sources
from saccade.engine.logs import read_rows
from saccade.engine.module import AUTOCAST_DTYPES, NonFiniteLoss
from saccade.engine.recipe import Recipe, load_recipe, to_dict
from saccade.engine.results import machine
from saccade.engine.train import Run, train
from saccade.reproduce.runner import STOPPED
from saccade.tasks.evaluators import ClassEvaluator
from saccade.tasks.load import card_of, load
from saccade.tasks.predict import make_eval_transform

TRAIN_IMAGES = 5000  # for the training top-1
CONTEXT_GIB = 1.5  # device memory beyond this, before the run allocates any, belongs to other processes
LATENCY_BATCH = 128


def main(folder: Path) -> int:
    spec = json.loads((folder / "spec.json").read_text())
    end_with_parent(spec["parent"])
    sessions = record_session(folder, spec)
    recipe = load_recipe(spec["run"]["recipe"], recipe_changes(spec))
    diverged, run = None, Run(folder / "train", {})
    try:
        run = train(recipe, run.out, resume=True, device=spec["device"], progress=False)
    except NonFiniteLoss as error:
        diverged = " ".join(str(error).replace(str(folder), "").split())
    if run.stopped:
        return STOPPED
    result = describe(spec, recipe, run, diverged) | {"sessions": sessions, "shared": is_shared(sessions)}
    write_json(spec["result"], result)
    return 0


def recipe_changes(spec: dict[str, Any]) -> list[Any]:
    run = spec["run"]
    model = {"name": run["model"], "kwargs": run["kwargs"], "head": run["head"]}
    return [("model", model), ("seed", run["seed"]), ("data.path", spec["data"]), *run["changes"]]


def end_with_parent(parent: int) -> None:
    """Stop as on SIGTERM when the process that started this one is gone: nothing trains unattended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def record_session(folder: Path, spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Add this process to the sessions of the run: how many runs share the device, memory of other processes on it."""
    file, device = folder / "sessions.json", spec["device"]
    sessions = json.loads(file.read_text()) if file.is_file() else []
    other = None
    if device.startswith("cuda"):
        free, total = torch.cuda.mem_get_info(device)
        other = round((total - free) / 2**30, 2)
    sessions.append({"parallel": spec["parallel"], "device_gib_in_use": other})
    write_json(file, sessions)
    return sessions


def is_shared(sessions: list[dict[str, Any]]) -> bool:
    """Whether other runs or processes used the device during a session."""
    return any(session["parallel"] > 1 or (session["device_gib_in_use"] or 0) > CONTEXT_GIB for session in sessions)


def describe(spec: dict[str, Any], recipe: Recipe, run: Run, diverged: str | None) -> dict[str, Any]:
    """The stored result: what was run, metrics after the last epoch, curve, cost, environment."""
    rows = read_rows(run.out / "metrics.csv")
    curve = [validation_row(rows, index) for index, row in enumerate(rows) if "val_loss" in row]
    last = curve[-1] if curve else {"val_top1": 0.0, "val_miou": 0.0}  # diverged before the first validation
    metrics = {key.removeprefix("val_"): value for key, value in last.items() if key.startswith("val_")}
    if not diverged and recipe.task == "classification":
        metrics["train_top1"] = train_top1(run.out, recipe, spec["device"])
        metrics["gap"] = metrics["train_top1"] - metrics["top1"]
    names = ("parameters", "multiply_adds", "epochs", "steps", "minutes", "train_images_per_s", "train_images")
    plain = to_dict(recipe)
    plain["data"]["path"] = spec["run"]["data"]  # not the path on this machine
    return {
        "key": spec["key"],
        "run": spec["run"],
        "metrics": {name: round(value, 4) for name, value in metrics.items()},
        "diverged": diverged,
        "curve": curve,
        **{name: run.result.get(name) for name in names},
        "latency_ms": latency(recipe, spec["device"]) if spec["run"]["exclusive"] and not diverged else None,
        "machine": run.result.get("machine") or machine(torch.device(spec["device"])),
        "recipe": plain,
    }


def validation_row(rows: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """A row of validation metrics with the training metrics logged before it."""
    before = next((row for row in reversed(rows[:index]) if "train_loss" in row), {})
    trained = {key: value for key, value in before.items() if key.startswith("train_")}
    return {key: value for key, value in (trained | rows[index]).items() if key != "images_per_s"}


def train_top1(out: Path, recipe: Recipe, device: str) -> float:
    """Top-1 of the last weights on training images without augmentation."""
    model = load(out / "last.safetensors")
    preprocess = card_of(model).preprocess
    sources = open_sources(load_recipe(to_dict(recipe), ["data.cache=false"]), preprocess.size)
    source = limited(sources.train, TRAIN_IMAGES, 0)
    batches = EvalLoader(source, make_eval_transform(preprocess), recipe.batch_size, 0)
    dtype = AUTOCAST_DTYPES.get(recipe.trainer.precision)
    evaluator = ClassEvaluator(len(sources.classes), preprocess)
    return evaluator.evaluate(model, batches, device, dtype).metrics["top1"]


def latency(recipe: Recipe, device: str) -> float:
    """Milliseconds per batch of the optimised inference copy; on a GPU captured in a CUDA graph."""
    cuda = device.startswith("cuda")
    case = Case(
        recipe.model.name,
        recipe.data.image_size or 224,
        LATENCY_BATCH if cuda else 8,
        dtype="bfloat16" if cuda else "float32",
        channels_last=True,
        device=device,
        optimized=True,
        cuda_graph=cuda,
        options=dict(recipe.model.kwargs),
    )
    return round(1000 * measure([case])[0].median, 4)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
