"""Whole-model transformations for inference: norm folding, casting, CUDA graphs, compile options."""

from typing import TYPE_CHECKING

from saccade._extras import lazy_imports

if TYPE_CHECKING:
    from saccade.inference.batch import PART_ROWS, predict_batch
    from saccade.inference.export import FORMATS, export_model
    from saccade.inference.export_check import check_export
    from saccade.inference.onnx_predict import OnnxModel, class_areas

__all__ = [
    "FORMATS",
    "PART_ROWS",
    "OnnxModel",
    "check_export",
    "class_areas",
    "export_model",
    "predict_batch",
]

__getattr__ = lazy_imports(__name__)
