"""Plain PyTorch modules that any network can use: attention, convolution, linear, MLP, norm, position, boxes, grid.

They know nothing of tokens or families, and call `saccade.ops` without testing device, dtype or grad mode.
"""

from saccade.layers.grid import to_pixels

__all__ = ["to_pixels"]
