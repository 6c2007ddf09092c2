"""Mask R-CNN (arXiv 1703.06870) from torchvision's parts, with the settings of the papers' experiments.

Boxes, anchors and scores stay float32 under autocast. torchvision creates anchors and decodes boxes in the dtype of
the features, and bfloat16 coordinates near 1000 px are 4 px apart.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.poolers import LevelMapper

from saccade.heads.backbone import BackboneMethods
from saccade.heads.mmdet import ExactAnchorGenerator, HalfPixelRoIAlign, TwoSidedBoxCoder
from saccade.heads.pyramid import NormLayer, Pyramid
from saccade.heads.targets import DetectionTarget, check_targets

ROI_LEVELS = ["0", "1", "2", "3"]  # pyramid levels that RoIAlign reads
BOX_HEAD_DIM = 1024


class RegionDetector(BackboneMethods, GeneralizedRCNN):
    """Feature pyramid, proposals and region heads in torchvision's protocol.

    Training: (list of images (3, H, W) in [0, 1], list of targets) -> dict of losses. Evaluation: list of images ->
    list of dicts with boxes (n, 4), labels (n,), scores (n,) and, with a mask head, masks (n, 1, H, W) in [0, 1].
    """

    backbone_path = "backbone.body"

    def __init__(self, backbone: Pyramid, rpn: nn.Module, roi_heads: nn.Module, transform: nn.Module, num_classes: int):
        super().__init__(backbone, rpn, roi_heads, transform)
        self.num_classes = num_classes

    def forward(self, images: Sequence[Tensor], targets: Sequence[DetectionTarget] | None = None):
        if self.training:
            check_targets(targets, len(images), self.num_classes, self.region_stages[0].has_mask())
        return super().forward(images, targets)  # type: ignore[arg-type] # torchvision declares lists, reads sequences

    @property
    def region_stages(self) -> list[RoIHeads]:
        """The heads applied one after the other: one in Mask R-CNN, three in the cascade."""
        return cast("list[RoIHeads]", list(getattr(self.roi_heads, "stages", [self.roi_heads])))

    def dry_run(self, images: Tensor, proposals: int = 1000, masks: int = 100) -> None:
        """Run every layer once, without value-dependent steps, to count multiply-adds on the meta device.

        images (1, 3, H, W) as the backbone reads them; `proposals` boxes go through the box heads and `masks` regions
        through the mask heads, as in mmdetection's counter, which the papers use.
        """
        features = self.backbone(images)
        rpn, width = cast(RegionProposalNetwork, self.rpn), cast(Pyramid, self.backbone).out_channels
        rpn.head(list(features.values()))
        for stage in self.region_stages:
            size = cast(MultiScaleRoIAlign, stage.box_roi_pool).output_size
            stage.box_predictor(stage.box_head(images.new_empty(proposals, width, *size)))
            if stage.has_mask():
                size = cast(MultiScaleRoIAlign, stage.mask_roi_pool).output_size
                predict_mask_logits(stage, images.new_empty(masks, width, *size))


class Float32AnchorGenerator(AnchorGenerator):
    """torchvision's anchors, at least float32."""

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        # The generator reads shape, dtype and device only: expand one element instead of casting the maps.
        maps = [
            promote_to_float32(torch.empty((), dtype=f.dtype, device=f.device)).expand(f.shape) for f in feature_maps
        ]
        return super().forward(image_list, maps)


class Float32RPNHead(RPNHead):
    """torchvision's objectness scores and anchor deltas, at least float32."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        scores, deltas = super().forward(x)
        return [promote_to_float32(level) for level in scores], [promote_to_float32(level) for level in deltas]


class Float32BoxPredictor(FastRCNNPredictor):
    """torchvision's class scores and box deltas of regions, at least float32."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, deltas = super().forward(x)
        return promote_to_float32(scores), promote_to_float32(deltas)


class Float32MaskPredictor(MaskRCNNPredictor):
    """torchvision's mask logits of regions, at least float32."""

    def forward(self, input: Tensor) -> Tensor:
        return promote_to_float32(super().forward(input))


def mask_rcnn(
    backbone: Pyramid,
    num_classes: int,
    transform: GeneralizedRCNNTransform,
    rpn: RegionProposalNetwork,
    masks: bool = True,
    box_head: str = "mlp",
    norm: NormLayer | None = None,
    **settings: Any,
) -> RegionDetector:
    """Mask R-CNN on a feature pyramid, or Faster R-CNN if not `masks`. `settings` go to `region_stage`."""
    stage = region_stage(backbone.out_channels, num_classes, masks, box_head, norm, norm, **settings)
    return RegionDetector(backbone, rpn, stage, transform, num_classes)


def region_stage(
    width: int,
    num_classes: int,
    masks: bool,
    box_head: str,
    box_norm: NormLayer | None,
    mask_norm: NormLayer | None,
    box_iou: float = 0.5,
    box_reg_weights: tuple[float, float, float, float] = (10.0, 10.0, 5.0, 5.0),
    box_batch_size_per_image: int = 512,
    box_positive_fraction: float = 0.25,
    box_score_thresh: float = 0.05,
    box_nms_thresh: float = 0.5,
    box_detections_per_img: int = 100,
    half_pixel: bool = False,
) -> RoIHeads:
    """Box head and mask head on regions. Names and defaults are torchvision's, which equal the papers'.

    `box_head` is "mlp" (two linear layers) or "conv" (four convolutions and one linear layer). torchvision also
    predicts a box and a mask for the background: 4 x 1025 and 257 parameters more than mmdetection's heads.
    `half_pixel` is mmdetection's RoIAlign, and its bounds of boxes.
    """
    pool = HalfPixelRoIAlign if half_pixel else partial(MultiScaleRoIAlign, sampling_ratio=2)
    box_pool = pool(ROI_LEVELS, output_size=7)
    if box_head == "conv":
        head = FastRCNNConvFCHead((width, 7, 7), [width] * 4, [BOX_HEAD_DIM], box_norm)
    else:
        head = TwoMLPHead(width * 7 * 7, BOX_HEAD_DIM)
    mask_parts = {}
    if masks:
        mask_parts = {
            "mask_roi_pool": pool(ROI_LEVELS, output_size=14),
            "mask_head": MaskRCNNHeads(width, [width] * 4, 1, mask_norm),
            "mask_predictor": Float32MaskPredictor(width, width, num_classes + 1),
        }
    stage = RoIHeads(
        box_pool,
        head,
        Float32BoxPredictor(BOX_HEAD_DIM, num_classes + 1),
        box_iou,
        box_iou,
        box_batch_size_per_image,
        box_positive_fraction,
        box_reg_weights,
        box_score_thresh,
        box_nms_thresh,
        box_detections_per_img,
        **mask_parts,
    )
    if half_pixel:
        stage.box_coder = TwoSidedBoxCoder(box_reg_weights)
    return stage


def proposal_network(
    width: int,
    anchor_sizes: Sequence[int | Sequence[int]] = (32, 64, 128, 256, 512),
    aspect_ratios: Sequence[float] = (0.5, 1.0, 2.0),
    rpn_pre_nms_top_n_train: int = 2000,
    rpn_post_nms_top_n_train: int = 1000,
    rpn_pre_nms_top_n_test: int = 1000,
    rpn_post_nms_top_n_test: int = 1000,
    rpn_nms_thresh: float = 0.7,
    rpn_fg_iou_thresh: float = 0.7,
    rpn_bg_iou_thresh: float = 0.3,
    rpn_batch_size_per_image: int = 256,
    rpn_positive_fraction: float = 0.5,
    rpn_score_thresh: float = 0.0,
    exact_anchors: bool = False,
) -> RegionProposalNetwork:
    """Region proposal network on strides 4 to 64, with one or several anchor sizes per level.

    Names are torchvision's, defaults the papers'. `exact_anchors` are mmdetection's, with its bounds of boxes.
    """
    sizes = [(size,) if isinstance(size, int) else tuple(size) for size in anchor_sizes]
    if len(sizes) != len(ROI_LEVELS) + 1 or len({len(level) for level in sizes}) != 1:
        raise ValueError(
            f"expected anchor_sizes for {len(ROI_LEVELS) + 1} levels, the same number of sizes per level; "
            f"got {anchor_sizes}."
        )
    generator = ExactAnchorGenerator if exact_anchors else Float32AnchorGenerator
    anchors = generator(tuple(sizes), (tuple(aspect_ratios),) * len(sizes))
    network = RegionProposalNetwork(
        anchors,
        Float32RPNHead(width, len(sizes[0]) * len(aspect_ratios)),
        rpn_fg_iou_thresh,
        rpn_bg_iou_thresh,
        rpn_batch_size_per_image,
        rpn_positive_fraction,
        {"training": rpn_pre_nms_top_n_train, "testing": rpn_pre_nms_top_n_test},
        {"training": rpn_post_nms_top_n_train, "testing": rpn_post_nms_top_n_test},
        rpn_nms_thresh,
        rpn_score_thresh,
    )
    if exact_anchors:
        network.box_coder = TwoSidedBoxCoder(network.box_coder.weights)
    return network


def set_strides(model: RegionDetector, strides: Sequence[int]) -> None:
    """Pool regions from features of these strides.

    torchvision infers them once, from the first batch, and halves them if padding makes its images more than 1.41
    times as high (below 68 px): predictions would depend on the image that a model has seen first.
    """
    for stage in model.region_stages:
        for pool in (stage.box_roi_pool, stage.mask_roi_pool):
            if isinstance(pool, MultiScaleRoIAlign):
                first, last = (int(strides[i]).bit_length() - 1 for i in (0, -1))
                pool.scales = [1 / stride for stride in strides]
                pool.map_levels = LevelMapper(first, last, pool.canonical_scale, pool.canonical_level)


def predict_boxes(
    stage: RoIHeads, features: dict[str, Tensor], proposals: list[Tensor], image_shapes: list[tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    """Class scores (n, K + 1) and box deltas (n, 4 (K + 1)) of all proposals of all images."""
    return stage.box_predictor(stage.box_head(stage.box_roi_pool(features, proposals, image_shapes)))


def predict_mask_logits(stage: RoIHeads, pooled: Tensor) -> Tensor:
    """pooled (n, C, 14, 14) -> mask logits (n, K + 1, 28, 28)."""
    assert stage.mask_head is not None  # callers check has_mask()
    assert stage.mask_predictor is not None
    return stage.mask_predictor(stage.mask_head(pooled))


def promote_to_float32(values: Tensor) -> Tensor:
    """float32, or float64 if the values are float64."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
