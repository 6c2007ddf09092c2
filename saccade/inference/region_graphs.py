"""Mask R-CNN and Cascade Mask R-CNN as ONNX graphs of tensors: proposals, regions, masks.

How many proposals and objects there are depends on the image, which a graph cannot express. The graphs have fixed
level_index of outputs, and `saccade.inference.onnx_regions` selects between them: non-maximum suppression, score
thresholds, masks pasted into the image.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, concat_box_prediction_layers
from torchvision.ops import MultiScaleRoIAlign, roi_align
from torchvision.ops.poolers import LevelMapper

from saccade.heads.mask_rcnn import RegionDetector, predict_mask_logits
from saccade.heads.mmdet import FINEST_SIDE, FIRST_STRIDE, HalfPixelRoIAlign

FEATURES: tuple[str, ...] = ("features_0", "features_1", "features_2", "features_3")  # strides 4, 8, 16, 32
EXAMPLE_SIZE = (160, 224)  # no level of the pyramid has a side of 1, which torch.export would take for a constant
EXAMPLE_REGIONS = 11


class ProposalGraph(nn.Module):
    """Normalised images (B, 3, H, W) -> one proposal per anchor, and the features that regions are pooled from.

    objectness (B, A) logits; boxes (B, A, 4) in pixels, clipped to the image; levels (A,) of the pyramid; features of
    strides 4, 8, 16 and 32. The graph pads images as the detector does.
    """

    outputs = ("objectness", "boxes", "levels", *FEATURES)

    def __init__(self, detector: RegionDetector, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.backbone = detector.backbone
        self.rpn = cast(RegionProposalNetwork, detector.rpn)
        self.multiple = int(cast(Any, detector.transform).size_divisible)
        self.dtype = dtype

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        batch, _, height, width = images.shape
        rows = (height + self.multiple - 1) // self.multiple * self.multiple
        columns = (width + self.multiple - 1) // self.multiple * self.multiple
        padded = F.pad(images, (0, columns - width, 0, rows - height))
        levels = list(self.backbone(padded.to(self.dtype)).values())
        objectness, deltas = self.rpn.head(levels)
        grids = [(scores.shape[-2], scores.shape[-1]) for scores in objectness]
        strides = [[_number(rows // grid[0]), _number(columns // grid[1])] for grid in grids]
        anchors = self.rpn.anchor_generator.grid_anchors(cast(Any, grids), strides)
        level_index = [torch.full_like(boxes[:, 0], i, dtype=torch.int64) for i, boxes in enumerate(anchors)]
        scores, flat = concat_box_prediction_layers(objectness, deltas)
        boxes = self.rpn.box_coder.decode_single(flat, torch.cat(anchors).repeat(batch, 1)).view(batch, -1, 4)
        boxes = clip_boxes(boxes, torch.stack([_number(height).float(), _number(width).float()]))
        features = [level.float() for level in levels[: len(FEATURES)]]
        return (scores.view(batch, -1), boxes, torch.cat(level_index), *features)


class RegionGraph(nn.Module):
    """Features and R boxes -> scores (R, K) of the classes without background, class_boxes (R, K, 4).

    All stages of a cascade run in this graph: each refines the boxes of the previous one, and scores are averaged.

    Inputs besides the features: boxes (R, 4) in pixels of the graph's input, image (R,) int64, its index in the batch,
    and sizes (B, 2): height and width of every image without padding.
    """

    inputs = (*FEATURES, "boxes", "image", "sizes")
    outputs = ("scores", "class_boxes")

    def __init__(self, detector: RegionDetector, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.stages = nn.ModuleList(detector.region_stages)
        self.pools = nn.ModuleList(
            LevelPool(cast(MultiScaleRoIAlign, stage.box_roi_pool)) for stage in detector.region_stages
        )
        self.dtype = dtype

    def forward(
        self, f0: Tensor, f1: Tensor, f2: Tensor, f3: Tensor, boxes: Tensor, image: Tensor, sizes: Tensor
    ) -> tuple[Tensor, Tensor]:
        limits = sizes[image]  # (R, 2)
        decoded, probabilities = boxes[:, None], []
        for i, (stage, pool) in enumerate(zip(self.stages, self.pools, strict=True)):
            stage = cast(RoIHeads, stage)
            if i:  # the box of the best class, as `refine_proposals`
                best = probabilities[-1][:, 1:].argmax(1) + 1
                boxes = decoded.gather(1, best[:, None, None].expand(-1, 1, 4))[:, 0]
            pooled = pool((f0, f1, f2, f3), boxes, image).to(self.dtype)
            logits, deltas = stage.box_predictor(stage.box_head(pooled))
            probabilities.append(logits.float().softmax(-1))
            decoded = stage.box_coder.decode_single(deltas.float(), boxes).unflatten(1, (-1, 4))
            decoded = clip_boxes(decoded, limits[:, None])
        return torch.stack(probabilities).mean(0)[:, 1:], decoded[:, 1:]


class MaskGraph(nn.Module):
    """Features and R boxes with their labels (R,) from 1 -> mask probabilities (R, 28, 28) in each box."""

    inputs = (*FEATURES, "boxes", "image", "labels")
    outputs = ("masks",)

    def __init__(self, detector: RegionDetector, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.stages = nn.ModuleList(detector.region_stages)
        self.pools = nn.ModuleList(
            LevelPool(cast(MultiScaleRoIAlign, stage.mask_roi_pool)) for stage in detector.region_stages
        )
        self.dtype = dtype

    def forward(
        self, f0: Tensor, f1: Tensor, f2: Tensor, f3: Tensor, boxes: Tensor, image: Tensor, labels: Tensor
    ) -> Tensor:
        masks = []
        for stage, pool in zip(self.stages, self.pools, strict=True):
            pooled = pool((f0, f1, f2, f3), boxes, image).to(self.dtype)
            logits = predict_mask_logits(cast(RoIHeads, stage), pooled).float()  # (R, K + 1, 28, 28)
            side = logits.shape[-1]
            masks.append(logits.gather(1, labels[:, None, None, None].expand(-1, 1, side, side))[:, 0].sigmoid())
        return torch.stack(masks).mean(0)


class LevelPool(nn.Module):
    """RoIAlign of every box from the level of its size: what `MultiScaleRoIAlign` and `HalfPixelRoIAlign` compute.

    They split the boxes by level, into level_index that depend on the boxes. Here every level pools all boxes, those of
    other levels as points at the origin, and the results are selected.
    """

    def __init__(self, pool: MultiScaleRoIAlign):
        super().__init__()
        self.size = int(pool.output_size[0]), int(pool.output_size[1])
        self.sampling_ratio = int(pool.sampling_ratio)
        self.half_pixel = isinstance(pool, HalfPixelRoIAlign)
        if self.half_pixel:
            self.scales = [1 / (FIRST_STRIDE << i) for i in range(len(FEATURES))]
        elif pool.scales is None:
            raise ValueError("expected a detector of saccade.create_detector, got one without strides of its features.")
        else:
            self.scales, self.mapper = list(pool.scales), cast(LevelMapper, pool.map_levels)

    def forward(self, features: Sequence[Tensor], boxes: Tensor, image: Tensor) -> Tensor:
        """features (B, C, H_i, W_i), boxes (R, 4), image (R,) -> pooled (R, C, S, S)."""
        level_index = self.levels(boxes)
        regions = torch.cat([image[:, None].to(boxes.dtype), boxes], 1)
        point = regions * torch.tensor([1.0, 0, 0, 0, 0])
        pooled = None
        for i, (level, scale) in enumerate(zip(features, self.scales, strict=True)):
            chosen = level_index == i
            regions_of_level = torch.where(chosen[:, None], regions, point)
            values = roi_align(level, regions_of_level, self.size, scale, self.sampling_ratio, aligned=self.half_pixel)
            pooled = values if pooled is None else torch.where(chosen[:, None, None, None], values, pooled)
        assert pooled is not None
        return pooled

    def levels(self, boxes: Tensor) -> Tensor:
        """The level (R,) of every box."""
        if not self.half_pixel:
            return self.mapper([boxes])
        sides = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).clamp(min=0).sqrt()
        return (sides / FINEST_SIDE + 1e-6).log2().floor().clamp(0, len(FEATURES) - 1)


def example_regions(
    features: Sequence[Tensor], axes: dict[int, str]
) -> tuple[dict[str, Tensor], dict[str, dict[int, str]]]:
    """Inputs of the region graphs for these features, and their dynamic axes, by name; `axes` of the images."""
    batch = len(features[0])
    shared = {0: "batch"} if 0 in axes else {}
    inputs: dict[str, Tensor] = dict(zip(FEATURES, features, strict=True))
    names: dict[str, dict[int, str]] = {}
    for i, name in enumerate(FEATURES):
        names[name] = shared | ({2: f"height_{i}", 3: f"width_{i}"} if 2 in axes else {})
    corners = torch.arange(EXAMPLE_REGIONS * 2.0).view(-1, 2)
    inputs["boxes"] = torch.cat([corners, 2 * corners + 8], 1)
    inputs["image"] = torch.arange(EXAMPLE_REGIONS) % batch
    inputs["sizes"] = torch.tensor([EXAMPLE_SIZE], dtype=torch.float32).repeat(batch, 1)
    inputs["labels"] = torch.ones(EXAMPLE_REGIONS, dtype=torch.int64)
    names |= {name: {0: "regions"} for name in ("boxes", "image", "labels")} | {"sizes": shared}
    return inputs, names


def clip_boxes(boxes: Tensor, sizes: Tensor) -> Tensor:
    """Clip boxes (…, 4) to images of `sizes` (…, 2), height and width."""
    return torch.minimum(boxes.clamp(min=0), sizes.flip(-1).repeat(*[1] * (sizes.ndim - 1), 2))


def _number(value: int) -> Tensor:
    return torch.scalar_tensor(value, dtype=torch.int64)
