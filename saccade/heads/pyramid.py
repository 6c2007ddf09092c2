"""Backbone with a feature pyramid (FPN, arXiv 1612.03144) for torchvision's detectors."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

NormLayer = Callable[..., nn.Module]


class Pyramid(nn.Module):
    """Map a backbone's four feature maps to one width and add a fifth of twice the last stride.

    Submodules are named as in torchvision's `BackboneWithFPN`: `body` is the backbone.
    """

    def __init__(self, body: nn.Module, channels: Sequence[int], width: int = 256, norm: NormLayer | None = None):
        super().__init__()
        self.body = body
        self.fpn = FeaturePyramidNetwork(list(channels), width, LastLevelMaxPool(), norm)
        self.out_channels = width

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """images (B, 3, H, W) -> {"0": (B, C, H/4, W/4), …, "3": (B, C, H/32, W/32), "pool": (B, C, H/64, W/64)}."""
        return self.fpn({str(i): features for i, features in enumerate(self.body(images))})
