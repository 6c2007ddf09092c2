"""Anchors, RoIAlign and boxes as mmdetection computes them, for its checkpoints; torchvision's differ slightly."""

import torch
from torch import Tensor
from torchvision.models.detection._utils import BoxCoder
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign, roi_align
from torchvision.ops._utils import convert_boxes_to_roi_format

FIRST_STRIDE = 4
FINEST_SIDE = 56  # of boxes; larger ones are pooled from the next level, twice as large ones from the one after it


class ExactAnchorGenerator(AnchorGenerator):
    """Anchors that are not rounded, on strides 4 to 64 at any image size, at least float32.

    torchvision rounds anchors to pixels and computes the last stride as 800 // 13 = 61 for an image of 800 px.
    """

    def generate_anchors(
        self,
        scales: list[int],
        aspect_ratios: list[float],
        dtype: torch.dtype = torch.float32,
        device: torch.device = torch.device("cpu"),  # noqa: B008 # torchvision's signature
    ) -> Tensor:
        """Anchors (A, 4) around the origin; aspect ratios are height / width."""
        roots = torch.tensor(aspect_ratios, dtype=dtype, device=device).sqrt()[:, None]
        sizes = torch.tensor(scales, dtype=dtype, device=device)
        width, height = (sizes / roots).flatten(), (sizes * roots).flatten()
        return torch.stack([-width, -height, width, height], dim=1) / 2

    def set_cell_anchors(self, dtype: torch.dtype, device: torch.device) -> None:
        super().set_cell_anchors(torch.promote_types(dtype, torch.float32), device)

    def grid_anchors(self, grid_sizes: list[list[int]], strides: list[list[Tensor]]) -> list[Tensor]:
        exact = [[torch.tensor(FIRST_STRIDE << i, device=stride[0].device)] * 2 for i, stride in enumerate(strides)]
        return super().grid_anchors(grid_sizes, exact)


class TwoSidedBoxCoder(BoxCoder):
    """Boxes from deltas whose changes of size are clamped to 16/1000 … 1000/16; torchvision clamps above only."""

    def decode_single(self, rel_codes: Tensor, boxes: Tensor) -> Tensor:
        """deltas (n, 4 K), boxes (n, 4) -> boxes (n, 4 K)."""
        low = [-torch.inf, -torch.inf, *(-self.bbox_xform_clip * weight for weight in self.weights[2:])]
        return super().decode_single(rel_codes.maximum(rel_codes.new_tensor(low * (rel_codes.shape[1] // 4))), boxes)


class HalfPixelRoIAlign(MultiScaleRoIAlign):
    """RoIAlign with pixel centres at half coordinates and as many samples per cell as it has pixels."""

    def __init__(self, featmap_names: list[str], output_size: int):
        super().__init__(featmap_names, output_size, sampling_ratio=0)

    def forward(self, x: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]) -> Tensor:
        """features of strides 4, 8, …, boxes (n, 4) of every image -> pooled (sum of n, C, S, S)."""
        levels = [x[name] for name in self.featmap_names]
        regions = convert_boxes_to_roi_format(boxes)  # (n, 5), image first
        sides = ((regions[:, 3] - regions[:, 1]) * (regions[:, 4] - regions[:, 2])).clamp(min=0).sqrt()
        number = (sides / FINEST_SIDE + 1e-6).log2().floor().clamp(0, len(levels) - 1)
        size = (self.output_size[0], self.output_size[1])
        pooled = levels[0].new_zeros(len(regions), levels[0].shape[1], *size)
        for i, features in enumerate(levels):
            chosen = torch.where(number == i)[0]
            scale = 1 / (FIRST_STRIDE << i)
            values = roi_align(
                features, regions[chosen].to(features.dtype), size, scale, sampling_ratio=0, aligned=True
            )
            pooled[chosen] = values.to(pooled.dtype)
        return pooled
