"""A backbone with a feature pyramid behind it, arXiv 1612.03144, as torchvision's detectors want it."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

Norm = Callable[..., nn.Module]


class Pyramid(nn.Module):
    """Four maps (B, C, H, W), fine to coarse -> as many of one width, and one of twice the last stride."""

    def __init__(self, body: nn.Module, channels: Sequence[int], width: int = 256, norm: Norm | None = None):
        super().__init__()
        self.body = body
        self.fpn = FeaturePyramidNetwork(list(channels), width, LastLevelMaxPool(), norm)
        self.out_channels = width

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """images (B, 3, H, W) -> {"0": (B, C, H/4, W/4), …, "3": (B, C, H/32, W/32), "pool": (B, C, H/64, W/64)}."""
        return self.fpn({str(i): features for i, features in enumerate(self.body(images))})
