"""Backbone with a feature pyramid for torchvision's detectors: FPN (arXiv 1612.03144) or VT-FPN (arXiv 2006.03677)."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from saccade.heads.vt_fpn import VTPyramid

NormLayer = Callable[..., nn.Module]


class Pyramid(nn.Module):
    """Map a backbone's four feature maps to one width and add a fifth of twice the last stride.

    Submodules are named as in torchvision's `BackboneWithFPN`: `body` is the backbone. `neck` is "fpn" or "vt_fpn"
    (which always has batch norm), with `neck_kwargs` for the options of `VTPyramid`.
    """

    def __init__(
        self,
        body: nn.Module,
        channels: Sequence[int],
        width: int = 256,
        norm: NormLayer | None = None,
        neck: str = "fpn",
        **neck_kwargs: Any,
    ):
        super().__init__()
        self.body = body
        if neck == "vt_fpn":
            self.fpn: nn.Module = VTNeck(channels, width, **neck_kwargs)
        else:
            self.fpn = FeaturePyramidNetwork(list(channels), width, LastLevelMaxPool(), norm, **neck_kwargs)
        self.out_channels = width

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """images (B, 3, H, W) -> {"0": (B, C, H/4, W/4), …, "3": (B, C, H/32, W/32), "pool": (B, C, H/64, W/64)}."""
        return self.fpn({str(i): features for i, features in enumerate(self.body(images))})


class VTNeck(VTPyramid):
    """`VTPyramid` with torchvision's interface; the fifth level is every second row and column of the coarsest."""

    def forward(self, pyramid: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        """{name: features (B, C_i, H_i, W_i)}, fine to coarse -> the same names with `dim` channels, and "pool"."""
        levels = OrderedDict(zip(pyramid, super().forward(list(pyramid.values())), strict=True))
        levels["pool"] = levels[next(reversed(levels))][:, :, ::2, ::2]
        return levels
