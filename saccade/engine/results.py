"""result.json: metrics of a run with machine, versions, date and command."""

import itertools
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from saccade._extras import package_version
from saccade.benchmark import count, describe_machine, loader_throughput
from saccade.engine.module import TrainingModule
from saccade.engine.recipe import to_dict
from saccade.tasks.evaluators import Evaluation

# Display names of the metrics of all tasks; all but the loss are percentages.
METRIC_NAMES = {"loss": "loss", "top1": "top-1", "top5": "top-5", "calibration": "calibration error"}
METRIC_NAMES |= {"map": "mAP", "f1": "F1"}
METRIC_NAMES |= {"cosine": "cosine similarity with the teacher", "agreement": "same class as the teacher"}
METRIC_NAMES |= {"miou": "mIoU", "macc": "mean class accuracy", "aacc": "pixel accuracy"}
METRIC_NAMES |= {"box_ap": "box AP", "box_ap50": "box AP50", "box_ap75": "box AP75"}
METRIC_NAMES |= {"mask_ap": "mask AP", "mask_ap50": "mask AP50", "mask_ap75": "mask AP75"}


def describe_run(
    model: nn.Module, module: TrainingModule, evaluation: Evaluation, best: dict[str, float], command: str
) -> dict[str, Any]:
    """Return the contents of result.json."""
    recipe, clock, sources, device = module.recipe, module.clock, module.sources, module.rng.device
    size, frames = recipe.data.val_size or module.preprocess.size, module.preprocess.frames
    cost = count(model, (3, frames, size, size) if frames > 1 else size)
    speed, seconds = clock.images_per_second(recipe.batch_size), recipe.trainer.loader_benchmark_seconds or None
    epochs = itertools.count(recipe.epochs)  # those that training has not used
    batches = itertools.chain.from_iterable(map(module.loaders.train.epoch, epochs))
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
        "epochs": round(module.epoch, 2),
        "minutes": round(clock.elapsed() / 60, 2),
        "train_images_per_s": speed and round(speed, 1),
        "loader_images_per_s": seconds and round(loader_throughput(batches, module.prepare_on_device, seconds), 1),
        "memory_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if device.type == "cuda" else None,
        "command": command,
        "machine": machine(device),
        "recipe": to_dict(recipe),
    }


def machine(device: torch.device) -> dict[str, Any]:
    """Return device, versions, date and commit."""
    versions = {name: version(name) for name in ("timm", "torchvision", "lightning")} | {"saccade": package_version()}
    return describe_machine(str(device)) | versions | {"system": platform.platform()}
