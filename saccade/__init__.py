"""saccade: token-based vision models for PyTorch.

Importing the package registers its models with timm and does nothing else. Public functions are imported on first use.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade import models as models
    from saccade.benchmark.cost import count
    from saccade.engine.evaluate import evaluate
    from saccade.engine.train import train
    from saccade.explanation.explain import explain
    from saccade.explanation.hooks.record import record
    from saccade.inference.optimize import optimize
    from saccade.models.card import Card
    from saccade.models.checkpoint import LoadReport, convert_official, load_checkpoint, save_checkpoint
    from saccade.models.registry import create_model, list_models
    from saccade.models.sparseformer_v2 import bootstrap
    from saccade.tasks.detection import create_detector
    from saccade.tasks.load import load
    from saccade.tasks.predict import predict
    from saccade.tasks.results import Classification, ClipPrediction, Detections, Predictions, Segmentation
    from saccade.tasks.segmentation import create_segmenter

__all__ = [
    "Card",
    "Classification",
    "ClipPrediction",
    "Detections",
    "LoadReport",
    "Predictions",
    "Segmentation",
    "bootstrap",
    "convert_official",
    "count",
    "create_detector",
    "create_model",
    "create_segmenter",
    "evaluate",
    "explain",
    "list_models",
    "load",
    "load_checkpoint",
    "optimize",
    "predict",
    "record",
    "save_checkpoint",
    "train",
]

_MODULES = {
    "Card": "saccade.models.card",
    "Classification": "saccade.tasks.results",
    "ClipPrediction": "saccade.tasks.results",
    "Detections": "saccade.tasks.results",
    "LoadReport": "saccade.models.checkpoint",
    "Predictions": "saccade.tasks.results",
    "Segmentation": "saccade.tasks.results",
    "bootstrap": "saccade.models.sparseformer_v2",
    "convert_official": "saccade.models.checkpoint",
    "count": "saccade.benchmark.cost",
    "create_detector": "saccade.tasks.detection",
    "create_model": "saccade.models.registry",
    "create_segmenter": "saccade.tasks.segmentation",
    "evaluate": "saccade.engine.evaluate",
    "explain": "saccade.explanation.explain",
    "list_models": "saccade.models.registry",
    "load": "saccade.tasks.load",
    "load_checkpoint": "saccade.models.checkpoint",
    "optimize": "saccade.inference.optimize",
    "predict": "saccade.tasks.predict",
    "record": "saccade.explanation.hooks.record",
    "save_checkpoint": "saccade.models.checkpoint",
    "train": "saccade.engine.train",
}


def __getattr__(name: str) -> Any:
    if name == "models":
        return import_module("saccade.models")
    if name == "__version__":
        from saccade._extras import package_version

        return package_version()
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'saccade' has no attribute {name!r}")


def _is_command_line() -> bool:
    """Whether this process is `saccade …` or `python -m saccade.cli …`.

    `saccade.cli.main` imports the models after it has parsed the arguments: `saccade --help` does not wait for torch.
    """
    command = Path(sys.argv[0]).name if sys.argv else ""
    return command in ("saccade", "saccade.exe") or (command == "-m" and "saccade.cli" in sys.orig_argv)


if not _is_command_line():
    import_module("saccade.models")  # registers the models with timm
