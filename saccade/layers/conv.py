"""Convolution, norm, ReLU: the brick of which dense heads are built; and resizing of maps."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.layers.batch_norm import fused_norm, learns_fused
from saccade.layers.residual import conv_norm_relu, fits_inference, folds_inside


class ConvNormRelu(nn.Module):
    """A convolution without bias that keeps the size, BatchNorm (or GroupNorm of `groups`), ReLU."""

    def __init__(self, in_dim: int, dim: int, kernel: int = 1, groups: int = 0):
        super().__init__()
        self.conv = nn.Conv2d(in_dim, dim, kernel, padding=kernel // 2, bias=False)
        self.norm = nn.GroupNorm(groups, dim) if groups else nn.BatchNorm2d(dim)
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> features (B, D, H, W)."""
        if not torch.jit.is_scripting():
            layers = (self.conv,), (self.norm,)
            if fits_inference(features, *layers) or folds_inside(features, *layers):
                return conv_norm_relu(self.conv, self.norm, features)
        features = self.conv(features)
        if not torch.jit.is_scripting():  # noqa: SIM102 (TorchScript skips the branch only when it stands alone)
            if learns_fused(self.norm, features):
                return fused_norm(self.norm, features, relu=True)
        return F.relu(self.norm(features))


def resize(features: Tensor, height: int, width: int) -> Tensor:
    """features (B, C, h, w) -> (B, C, H, W), bilinear, pixel centres kept in place."""
    return F.interpolate(features, (height, width), mode="bilinear", align_corners=False)


def resize_like(features: Tensor, other: Tensor) -> Tensor:
    """features (B, C, h, w) to the height and width of another map."""
    return resize(features, other.shape[2], other.shape[3])
