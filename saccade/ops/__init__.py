"""Fused operations: each a reference in plain PyTorch and, where it pays, a Triton kernel (or a cuDNN, oneDNN call).

Models call them unconditionally; `_dispatch` decides which implementation runs, `_launch` launches kernels.
"""

from saccade.ops._dispatch import REGISTRY, disabled, enabled, interpreted, record_implementations

__all__ = ["REGISTRY", "disabled", "enabled", "interpreted", "record_implementations"]
