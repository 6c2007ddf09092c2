"""Cascade Mask R-CNN, arXiv 1712.00726: three box heads in a row, each on the boxes of the one before.

Every stage is a whole `RoIHeads` of torchvision with its own overlap threshold and box weights; what is new here is
the order of things. As in mmdetection's configuration that SViT's experiments use, every stage has a mask head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss, maskrcnn_inference, maskrcnn_loss
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import clip_boxes_to_image, generalized_box_iou_loss

from saccade.heads.mask_rcnn import RegionDetector, region_stage
from saccade.heads.pyramid import Norm, Pyramid
from saccade.heads.targets import Target

IOUS = (0.5, 0.6, 0.7)  # overlap from which on a region counts as an object
BOX_WEIGHTS = ((10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0))
LOSS_WEIGHTS = (1.0, 0.5, 0.25)
GIOU_WEIGHT = 10.0


class CascadeHeads(nn.Module):
    """Stages of `RoIHeads`: boxes are refined from stage to stage, scores and masks averaged over them."""

    def __init__(self, stages: Sequence[RoIHeads], loss_weights: Sequence[float], box_loss: str = "giou"):
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.loss_weights = list(loss_weights)
        self.box_loss = box_loss

    def has_mask(self) -> bool:
        return self.stages[0].has_mask()

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: list[Target] | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """The call of torchvision's `RoIHeads`: (detections, {}) in evaluation, ([], losses) in training."""
        if self.training:
            assert targets is not None  # checked by the detector
            return [], self.losses(features, proposals, image_shapes, targets)
        return self.detect(features, proposals, image_shapes), {}

    def losses(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: list[Target],
    ) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for i, (stage, weight) in enumerate(zip(self.stages, self.loss_weights, strict=True)):
            proposals, matched, labels, shifts = stage.select_training_samples(proposals, targets)
            scores, moves = predict_boxes(stage, features, proposals, image_shapes)
            by_class, by_box = fastrcnn_loss(scores, moves, labels, shifts)
            if self.box_loss == "giou":
                by_box = giou_loss(stage, moves, proposals, labels, shifts)
            found[f"loss_classifier_{i}"] = weight * by_class
            found[f"loss_box_reg_{i}"] = weight * by_box
            if stage.has_mask():
                found[f"loss_mask_{i}"] = weight * mask_loss(
                    stage, features, proposals, image_shapes, matched, labels, targets
                )
            if i + 1 < len(self.stages):
                proposals = refine(stage, scores.detach(), moves.detach(), proposals, image_shapes, labels)
                # A true box that took part as a proposal does so again by itself; moved, it would be an easy lie.
                true = [(kind > 0) & (shift == 0).all(1) for kind, shift in zip(labels, shifts, strict=True)]
                proposals = [boxes[~given] for boxes, given in zip(proposals, true, strict=True)]
        return found

    def detect(
        self, features: dict[str, Tensor], proposals: list[Tensor], image_shapes: list[tuple[int, int]]
    ) -> list[dict[str, Tensor]]:
        probabilities = []
        for i, stage in enumerate(self.stages):
            scores, moves = predict_boxes(stage, features, proposals, image_shapes)
            probabilities.append(scores.softmax(-1))
            if i + 1 < len(self.stages):
                proposals = refine(stage, scores, moves, proposals, image_shapes)
        mean = torch.stack(probabilities).mean(0)
        # torchvision takes the softmax of what it gets, and that of a logarithm of probabilities gives them back.
        kept = stage.postprocess_detections(mean.clamp(min=1e-30).log(), moves, proposals, image_shapes)
        detections: list[dict[str, Tensor]] = [
            {"boxes": boxes, "labels": labels, "scores": scores} for boxes, scores, labels in zip(*kept, strict=True)
        ]
        if self.has_mask():
            labels = [found["labels"] for found in detections]
            boxes = [found["boxes"] for found in detections]
            per_stage = [
                maskrcnn_inference(mask_scores(stage, features, boxes, image_shapes), labels) for stage in self.stages
            ]
            for found, *masks in zip(detections, *per_stage, strict=True):
                found["masks"] = torch.stack(masks).mean(0)
        return detections


def predict_boxes(
    stage: RoIHeads, features: dict[str, Tensor], proposals: list[Tensor], image_shapes: list[tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    """Scores (n, K + 1) and shifts (n, 4 (K + 1)) of all proposals of all images."""
    return stage.box_predictor(stage.box_head(stage.box_roi_pool(features, proposals, image_shapes)))


def mask_scores(
    stage: RoIHeads, features: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]
) -> Tensor:
    """(n, K + 1, 28, 28) of all boxes of all images."""
    pooled = stage.mask_roi_pool(features, boxes, image_shapes)  # type: ignore[misc]
    return stage.mask_predictor(stage.mask_head(pooled))  # type: ignore[misc]


def refine(
    stage: RoIHeads,
    scores: Tensor,
    moves: Tensor,
    proposals: list[Tensor],
    image_shapes: list[tuple[int, int]],
    labels: list[Tensor] | None = None,
) -> list[Tensor]:
    """Proposals moved by the shifts of their own class: the true one where it is known, else the best object class."""
    chosen = scores[:, 1:].argmax(1) + 1
    if labels is not None:
        known = torch.cat(labels)
        chosen = torch.where(known > 0, known, chosen)
    boxes = stage.box_coder.decode(moves, proposals).flatten(1).unflatten(1, (-1, 4))  # (n, K + 1, 4)
    boxes = boxes[torch.arange(len(chosen), device=chosen.device), chosen]
    split = boxes.split([len(old) for old in proposals])
    return [clip_boxes_to_image(new, shape) for new, shape in zip(split, image_shapes, strict=True)]


def giou_loss(
    stage: RoIHeads, moves: Tensor, proposals: list[Tensor], labels: list[Tensor], shifts: list[Tensor]
) -> Tensor:
    """1 - GIoU (arXiv 1902.09630) between moved and true boxes, over all samples, as mmdetection weighs it."""
    kind, given, places = torch.cat(labels), torch.cat(list(shifts)), torch.cat(proposals)
    objects = torch.where(kind > 0)[0]
    moved = moves.unflatten(1, (-1, 4))[objects, kind[objects]]
    boxes = stage.box_coder.decode_single(moved, places[objects])
    true = stage.box_coder.decode_single(given[objects], places[objects])
    return GIOU_WEIGHT * generalized_box_iou_loss(boxes, true, reduction="sum") / max(len(kind), 1)


def mask_loss(
    stage: RoIHeads,
    features: dict[str, Tensor],
    proposals: list[Tensor],
    image_shapes: list[tuple[int, int]],
    matched: list[Tensor],
    labels: list[Tensor],
    targets: list[Target],
) -> Tensor:
    objects = [torch.where(kind > 0)[0] for kind in labels]
    boxes = [boxes[chosen] for boxes, chosen in zip(proposals, objects, strict=True)]
    indices = [index[chosen] for index, chosen in zip(matched, objects, strict=True)]
    masks, kinds = [target["masks"] for target in targets], [target["labels"] for target in targets]
    return maskrcnn_loss(mask_scores(stage, features, boxes, image_shapes), boxes, masks, kinds, indices)


def cascade_mask_rcnn(
    backbone: Pyramid,
    num_classes: int,
    transform: GeneralizedRCNNTransform,
    rpn: RegionProposalNetwork,
    masks: bool = True,
    box_head: str = "conv",
    norm: Norm | None = None,
    box_loss: str = "giou",
    loss_weights: Sequence[float] = LOSS_WEIGHTS,
    **settings,
) -> RegionDetector:
    """Three stages on a pyramid. Convolutional box heads always have a norm, as in the experiments with Swin."""
    stages = [
        region_stage(
            backbone.out_channels,
            num_classes,
            masks,
            box_head,
            norm or nn.BatchNorm2d,
            norm,
            **({"box_iou": iou, "box_reg_weights": weights} | settings),
        )
        for iou, weights in zip(IOUS, BOX_WEIGHTS, strict=True)
    ]
    return RegionDetector(backbone, rpn, CascadeHeads(stages, loss_weights, box_loss), transform, num_classes)
