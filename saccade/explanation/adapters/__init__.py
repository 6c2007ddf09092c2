"""Saccade models in other explanation tools: Quantus, Captum and pytorch-grad-cam.

quantus   `explain_func`: token importance as a heat map
captum    `feature_mask`: pixels grouped by token; `TokenModel`: attributions over tokens
grad_cam  `target_layers` and `reshape_transform` of every family

The adapters import none of the three; `pip install 'saccade[explain]'` installs them.
"""

from saccade.explanation.adapters.captum import TokenModel, feature_mask
from saccade.explanation.adapters.grad_cam import reshape_transform, target_layers
from saccade.explanation.adapters.quantus import explain_func

__all__ = ["TokenModel", "explain_func", "feature_mask", "reshape_transform", "target_layers"]
