"""saccade: token-based vision models for PyTorch.

Importing the package registers its models with timm and does nothing else. Public functions are imported on first use.
`__all__` is the contract: documentation, examples, command line and web page use these names and those of `PACKAGES`.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade._extras import lazy_imports, package_version

if TYPE_CHECKING:
    from saccade import benchmark as benchmark
    from saccade import data as data
    from saccade import explanation as explanation
    from saccade import inference as inference
    from saccade import layers as layers
    from saccade import models as models
    from saccade import tokens as tokens
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
    from saccade.tasks.predict import predict, predict_stream
    from saccade.tasks.results import (
        Classification,
        ClipPrediction,
        Detections,
        Prediction,
        Predictions,
        Segmentation,
        Unreadable,
    )
    from saccade.tasks.segmentation import create_segmenter

__all__ = [
    "Card",
    "Classification",
    "ClipPrediction",
    "Detections",
    "LoadReport",
    "Prediction",
    "Predictions",
    "Segmentation",
    "Unreadable",
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
    "predict_stream",
    "record",
    "save_checkpoint",
    "train",
]

# Packages whose `__all__` is public too; everything else may change without notice.
PACKAGES = ("benchmark", "data", "explanation", "inference", "layers", "models", "tokens")

_lazy = lazy_imports(__name__)


def __getattr__(name: str) -> Any:
    return package_version() if name == "__version__" else _lazy(name)


def _is_command_line() -> bool:
    """Whether this process is `saccade …` or `python -m saccade.cli …`.

    `saccade.cli.main` imports the models after it has parsed the arguments: `saccade --help` does not wait for torch.
    """
    command = Path(sys.argv[0]).name if sys.argv else ""
    return command in ("saccade", "saccade.exe") or (command == "-m" and "saccade.cli" in sys.orig_argv)


if not _is_command_line():
    import_module("saccade.models")  # registers the models with timm
