"""saccade: see an image as a few tokens.

Importing registers every model with timm's registry; nothing else happens, and nothing heavy is loaded
beyond torch and timm themselves.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from saccade import explain as explain  # a package that can be called
from saccade import models as models  # registers the models
from saccade.explain.hooks.record import record
from saccade.models.checkpoint import LoadReport, convert_official, load_checkpoint, save_checkpoint
from saccade.models.registry import create_model, list_models
from saccade.tasks.detection import create_detector
from saccade.tasks.segmentation import create_segmenter

if TYPE_CHECKING:
    from saccade.explain.explanation import explain as explain
    from saccade.inference.optimize import optimize

try:
    __version__ = version("saccade")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

__all__ = [
    "LoadReport",
    "convert_official",
    "create_detector",
    "create_model",
    "create_segmenter",
    "explain",
    "list_models",
    "load_checkpoint",
    "optimize",
    "record",
    "save_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name == "optimize":  # tracing machinery that only deployment needs
        from saccade.inference.optimize import optimize

        return optimize
    raise AttributeError(f"module 'saccade' has no attribute {name!r}")
