"""result.json: metrics of a run with machine, versions, date and command."""

import json
import os
import platform
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from saccade.benchmark import count, describe_machine
from saccade.engine.module import TrainingModule
from saccade.engine.recipe import to_dict

# Display names of the metrics of all tasks; all but the loss are percentages.
METRIC_NAMES = {"loss": "loss", "top1": "top-1", "top5": "top-5", "calibration": "calibration error"}
METRIC_NAMES |= {"cosine": "cosine similarity with the teacher", "agreement": "same class as the teacher"}
METRIC_NAMES |= {"miou": "mIoU", "macc": "mean class accuracy", "aacc": "pixel accuracy"}
METRIC_NAMES |= {"box_ap": "box AP", "box_ap50": "box AP50", "box_ap75": "box AP75"}
METRIC_NAMES |= {"mask_ap": "mask AP", "mask_ap50": "mask AP50", "mask_ap75": "mask AP75"}


def describe_run(
    model: nn.Module,
    module: TrainingModule,
    evaluation: Any,
    best: dict[str, float],
    command: str,
    device: torch.device,
) -> dict[str, Any]:
    """Return the contents of result.json."""
    recipe, clock, sources = module.recipe, module.clock, module.sources
    size = recipe.data.val_size or module.preprocess.size
    frames = module.preprocess.frames
    cost = count(model, (3, frames, size, size) if frames > 1 else size)
    speed = clock.images_per_second(recipe.batch_size)
    return {
        "model": "+".join(filter(None, (recipe.model.name, recipe.model.head))),
        "task": recipe.task,
        "score": module.monitor,
        "data": Path(recipe.data.path).name,
        "image_size": size,
        "classes": len(sources.classes),
        "train_images": len(sources.train),
        "val_images": len(sources.val),
        "unreadable": len(sources.unreadable),
        "unreadable_images": list(sources.unreadable.reasons.values())[:100],
        "parameters": cost.params,
        "multiply_adds": cost.madds,
        "final": evaluation.summary(),
        "best": {key: round(value, 4) for key, value in best.items()},
        "steps": clock.steps,
        "epochs": round(clock.steps / (clock.total_steps / recipe.epochs), 2),
        "minutes": round(clock.elapsed() / 60, 2),
        "train_images_per_s": speed and round(speed, 1),
        "loader_images_per_s": loader_speed(module, recipe.trainer.loader_benchmark_seconds),
        "memory_gib": peak_memory(device),
        "command": command,
        "machine": machine(device),
        "recipe": to_dict(recipe),
    }


def machine(device: torch.device) -> dict[str, Any]:
    versions = {}
    for name in ("saccade", "timm", "torchvision", "lightning"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # a source tree that is not installed
            versions[name] = "unknown"
    device_name = str(device) if device.type == "cuda" else "cpu"
    return describe_machine(device_name) | versions | {"system": platform.platform()}


def peak_memory(device: torch.device) -> float | None:
    return round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if device.type == "cuda" else None


def loader_speed(module: TrainingModule, seconds: float) -> float | None:
    """Return images/s of loading and augmenting as in training but without the model, on this process alone."""
    if not seconds:
        return None
    device = module.rng.device
    images, started, epoch = 0, None, module.recipe.epochs  # an epoch that training has not used
    while started is None or time.monotonic() - started < seconds:
        for batch in module.loaders.train.epoch(epoch):
            module.prepare(module.transfer_batch_to_device(batch, device, 0))
            if started is None:  # the first batch includes the start of the loader processes
                started = time.monotonic()
                continue
            images += len(batch.labels)
            if time.monotonic() - started > seconds:
                break
        epoch += 1
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return round(images / (time.monotonic() - started), 1)


def write_json(path: Path, document: Any) -> None:
    """Write JSON atomically."""
    write_text(path, json.dumps(document, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write text atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
