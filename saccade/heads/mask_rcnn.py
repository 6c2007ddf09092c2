"""Mask R-CNN, arXiv 1703.06870: torchvision's parts, put together as the papers' experiments have them.

Proposals from anchors, RoIAlign, a box head on every proposal, a mask head on every detection. Everything that is a
place on the image stays float32 under autocast: torchvision would make anchors and boxes in the type of the features,
and in bfloat16 the places near the far side of a large image are 4 px apart.
"""

from collections.abc import Sequence

import torch
from timm.models._features import FeatureGetterNet
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

from saccade.heads.pyramid import Norm, Pyramid
from saccade.heads.targets import Target, check_targets

LEVELS = ["0", "1", "2", "3"]  # the maps that RoIAlign reads
HIDDEN = 1024  # width of the box head


class RegionDetector(GeneralizedRCNN):
    """Pyramid, proposals, heads on regions, in torchvision's protocol.

    Training: (list of images (3, H, W) in [0, 1], list of targets) -> dict of losses. Evaluation: list of images ->
    list of dicts with boxes (n, 4), labels (n,), scores (n,) and, with a mask head, masks (n, 1, H, W) in [0, 1].
    """

    def __init__(self, backbone: Pyramid, rpn: nn.Module, roi_heads: nn.Module, transform: nn.Module, num_classes: int):
        super().__init__(backbone, rpn, roi_heads, transform)
        self.num_classes = num_classes

    def forward(self, images: Sequence[Tensor], targets: Sequence[Target] | None = None):
        if self.training:
            check_targets(targets, len(images), self.num_classes, self.roi_heads.has_mask())
        return super().forward(images, targets)  # type: ignore[arg-type]

    @property
    def backbone_model(self) -> nn.Module:
        """The backbone itself, without timm's wrapper."""
        body = self.backbone.body
        return body.model if isinstance(body, FeatureGetterNet) else body  # type: ignore[return-value]

    def no_weight_decay(self) -> set[str]:
        """Names the backbone exempts from weight decay."""
        place = "backbone.body." if self.backbone_model is self.backbone.body else "backbone.body.model."
        return {place + name for name in getattr(self.backbone_model, "no_weight_decay", set)()}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.backbone_model.set_grad_checkpointing(enable)

    def dry_run(self, images: Tensor, proposals: int = 1000, masks: int = 100) -> None:
        """All that multiplies, once, without anything that depends on values: for counting on the meta device.

        A batch (1, 3, H, W) as the backbone gets it, `proposals` through the box heads and `masks` regions through
        the mask heads: what mmdetection's counter does, and with it the papers.
        """
        features = self.backbone(images)
        self.rpn.head(list(features.values()))
        width = self.backbone.out_channels
        for stage in getattr(self.roi_heads, "stages", [self.roi_heads]):
            stage.box_predictor(stage.box_head(images.new_empty(proposals, width, *stage.box_roi_pool.output_size)))
            if stage.has_mask():
                size = stage.mask_roi_pool.output_size
                stage.mask_predictor(stage.mask_head(images.new_empty(masks, width, *size)))


class Anchors(AnchorGenerator):
    """torchvision's anchors, float32 at least."""

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        # The generator reads nothing but shape, type and device of the maps: one number, shown in their shape.
        maps = [precise(torch.empty((), dtype=f.dtype, device=f.device)).expand(f.shape) for f in feature_maps]
        return super().forward(image_list, maps)


class ProposalHead(RPNHead):
    """torchvision's scores and shifts of anchors, float32 at least."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        scores, shifts = super().forward(x)
        return [precise(level) for level in scores], [precise(level) for level in shifts]


class BoxPredictor(FastRCNNPredictor):
    """torchvision's class scores and box shifts of regions, float32 at least."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, shifts = super().forward(x)
        return precise(scores), precise(shifts)


class MaskPredictor(MaskRCNNPredictor):
    """torchvision's mask scores of regions, float32 at least."""

    def forward(self, input: Tensor) -> Tensor:
        return precise(super().forward(input))


def precise(values: Tensor) -> Tensor:
    """float32, or float64 where the model is."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def mask_rcnn(
    backbone: Pyramid,
    num_classes: int,
    transform: GeneralizedRCNNTransform,
    rpn: RegionProposalNetwork,
    masks: bool = True,
    box_head: str = "mlp",
    norm: Norm | None = None,
    **settings,
) -> RegionDetector:
    """Mask R-CNN on a pyramid; without `masks`, Faster R-CNN. `settings` are those of `region_stage`."""
    stage = region_stage(backbone.out_channels, num_classes, masks, box_head, norm, norm, **settings)
    return RegionDetector(backbone, rpn, stage, transform, num_classes)


def region_stage(
    width: int,
    num_classes: int,
    masks: bool,
    box_head: str,
    box_norm: Norm | None,
    mask_norm: Norm | None,
    box_iou: float = 0.5,
    box_reg_weights: tuple[float, float, float, float] = (10.0, 10.0, 5.0, 5.0),
    box_batch_size_per_image: int = 512,
    box_positive_fraction: float = 0.25,
    box_score_thresh: float = 0.05,
    box_nms_thresh: float = 0.5,
    box_detections_per_img: int = 100,
) -> RoIHeads:
    """Box head and mask head on regions; names and values as in torchvision, which has the papers' here.

    `box_head` is "mlp" (two linear layers) or "conv" (four convolutions and one linear layer). torchvision gives the
    background a box and a mask of its own: 4 x 1025 and 257 parameters more than mmdetection's heads.
    """
    box_pool = MultiScaleRoIAlign(LEVELS, output_size=7, sampling_ratio=2)
    if box_head == "conv":
        head = FastRCNNConvFCHead((width, 7, 7), [width] * 4, [HIDDEN], box_norm)
    else:
        head = TwoMLPHead(width * 7 * 7, HIDDEN)
    mask_parts = {}
    if masks:
        mask_parts = {
            "mask_roi_pool": MultiScaleRoIAlign(LEVELS, output_size=14, sampling_ratio=2),
            "mask_head": MaskRCNNHeads(width, [width] * 4, 1, mask_norm),
            "mask_predictor": MaskPredictor(width, width, num_classes + 1),
        }
    return RoIHeads(
        box_pool,
        head,
        BoxPredictor(HIDDEN, num_classes + 1),
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
) -> RegionProposalNetwork:
    """Proposals from anchors of one size a level, or as many of each; strides 4 to 64.

    Names as in torchvision, values as in the papers.
    """
    sizes = [(size,) if isinstance(size, int) else tuple(size) for size in anchor_sizes]
    if len(sizes) != len(LEVELS) + 1 or len({len(level) for level in sizes}) != 1:
        raise ValueError(
            f"the pyramid has {len(LEVELS) + 1} levels, each with anchors of one size or as many as the others; "
            f"got {anchor_sizes}."
        )
    anchors = Anchors(tuple(sizes), (tuple(aspect_ratios),) * len(sizes))
    return RegionProposalNetwork(
        anchors,
        ProposalHead(width, len(sizes[0]) * len(aspect_ratios)),
        rpn_fg_iou_thresh,
        rpn_bg_iou_thresh,
        rpn_batch_size_per_image,
        rpn_positive_fraction,
        {"training": rpn_pre_nms_top_n_train, "testing": rpn_pre_nms_top_n_test},
        {"training": rpn_post_nms_top_n_train, "testing": rpn_post_nms_top_n_test},
        rpn_nms_thresh,
        rpn_score_thresh,
    )
