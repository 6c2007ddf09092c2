"""One run: FOLDER/spec.json says what to train; the result is written to the file that it names.

A run that was stopped by a signal exits with `STOPPED` and continues from its checkpoint when it is started again.
"""

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch

import saccade.models  # noqa: F401  (registers the models with timm)
from saccade._files import write_json
from saccade.benchmark import Case, count, measure
from saccade.data.sources.base import Subset, limited
from saccade.engine.logs import read_rows
from saccade.engine.module import NonFiniteLoss, TrainingModule
from saccade.engine.recipe import Recipe, load_recipe, to_dict
from saccade.engine.results import machine
from saccade.engine.train import fit, set_up
from saccade.reproduce.runner import STOPPED

TRAIN_IMAGES = 5000  # for the training top-1
CONTEXT_GIB = 1.5  # device memory beyond this, before the run allocates any, belongs to other processes
LATENCY_BATCH = 128


def main(folder: Path) -> int:
    spec = json.loads((folder / "spec.json").read_text())
    end_with_parent()
    sessions = record_session(folder, spec)
    recipe, diverged = load_recipe(spec["run"]["recipe"], recipe_changes(spec)), None
    times = [spec["started"], time.time()]
    session = set_up(recipe, folder / "train", spec["device"])
    times.append(time.time())
    try:
        if fit(session):
            return STOPPED
    except NonFiniteLoss as error:
        diverged = " ".join(str(error).replace(str(folder), "").split())
    times.append(time.time())  # training includes validation
    result = describe(spec, session.module, diverged)
    times.append(time.time())
    steps = zip(("start", "data", "training", "evaluation"), times[:-1], times[1:], strict=True)
    result["seconds"] = {name: round(end - start, 2) for name, start, end in steps}
    write_json(spec["result"], result | {"sessions": sessions, "shared": is_shared(sessions)})
    return 0


def recipe_changes(spec: dict[str, Any]) -> list[Any]:
    run = spec["run"]
    model = {"name": run["model"], "kwargs": run["kwargs"], "head": run["head"]}
    data = [("data.path", spec["data"]), ("data.cache_folder", spec["cache"])]
    return [("model", model), ("seed", run["seed"]), *data, *run["changes"]]


def end_with_parent() -> None:
    """Stop as on SIGTERM when the process that started this one is gone: nothing trains unattended."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
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


def describe(spec: dict[str, Any], module: TrainingModule, diverged: str | None) -> dict[str, Any]:
    """The stored result: what was run, metrics after the last epoch, curve, cost, environment."""
    recipe, clock, device = module.recipe, module.clock, spec["device"]
    rows = read_rows(Path(module.out) / "metrics.csv")
    curve = [validation_row(rows, index) for index, row in enumerate(rows) if "val_loss" in row]
    last = curve[-1] if curve else {"val_top1": 0.0, "val_miou": 0.0}  # diverged before the first validation
    metrics = {key.removeprefix("val_"): value for key, value in last.items() if key.startswith("val_")}
    if not diverged and recipe.task == "classification":
        metrics["train_top1"] = train_top1(module, device)
        metrics["gap"] = metrics["train_top1"] - metrics["top1"]
    cost, speed = count(module.model, module.preprocess.size), clock.images_per_second(recipe.batch_size)
    plain = to_dict(recipe)
    plain["data"] |= {"path": spec["run"]["data"], "cache_folder": None}  # not the paths on this machine
    return {
        "key": spec["key"],
        "run": spec["run"],
        "metrics": {name: round(value, 4) for name, value in metrics.items()},
        "diverged": diverged,
        "curve": curve,
        "parameters": cost.params,
        "multiply_adds": cost.madds,
        "epochs": round(module.epoch, 2),
        "steps": clock.steps,
        "minutes": round(clock.elapsed() / 60, 2),
        "train_images_per_s": speed and round(speed, 1),
        "train_images": len(module.sources.train),
        "latency_ms": latency(recipe, device) if spec["run"]["exclusive"] and not diverged else None,
        "machine": machine(torch.device(device)),
        "recipe": plain,
    }


def validation_row(rows: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """A row of validation metrics with the training metrics logged before it."""
    before = next((row for row in reversed(rows[:index]) if "train_loss" in row), {})
    trained = {key: value for key, value in before.items() if key.startswith("train_")}
    return {key: value for key, value in (trained | rows[index]).items() if key != "images_per_s"}


def train_top1(module: TrainingModule, device: str) -> float:
    """Top-1 of the last weights on training images, preprocessed as in validation."""
    sources = module.sources
    chosen, memory = limited(sources.train, TRAIN_IMAGES, 0), sources.train_memory
    if memory is not None:
        part = isinstance(chosen, Subset) and chosen is not sources.train
        mask = torch.isin(memory.indices, torch.as_tensor(chosen.indices if part else range(len(chosen))))
        memory = memory._replace(images=memory.images[mask], labels=memory.labels[mask], indices=memory.indices[mask])
    module.sources = sources._replace(val=chosen, val_memory=memory)
    return module.evaluate(module.eval_model, torch.device(device)).metrics["top1"]


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
