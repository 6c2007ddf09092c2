"""Cascade Mask R-CNN (arXiv 1712.00726): three box heads, each on the boxes refined by the previous one.

Every stage is torchvision's `RoIHeads` with its own IoU threshold and box weights. Every stage has a mask head, as in
the mmdetection configuration of SViT Sec. 4.2.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss, maskrcnn_inference, maskrcnn_loss
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import clip_boxes_to_image, generalized_box_iou_loss

from saccade.heads.mask_rcnn import RegionDetector, predict_boxes, predict_mask_logits, region_stage
from saccade.heads.pyramid import NormLayer, Pyramid
from saccade.heads.targets import DetectionTarget

IOU_THRESHOLDS = (0.5, 0.6, 0.7)  # minimum overlap of a positive proposal, per stage
BOX_WEIGHTS = ((10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0))
LOSS_WEIGHTS = (1.0, 0.5, 0.25)
GIOU_WEIGHT = 10.0

Features = dict[str, Tensor]
ImageShapes = list[tuple[int, int]]


class CascadeHeads(nn.Module):
    """`RoIHeads` in sequence: boxes are refined from stage to stage, scores and masks averaged over the stages."""

    def __init__(self, stages: Sequence[RoIHeads], loss_weights: Sequence[float], box_loss: str = "giou"):
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.loss_weights = list(loss_weights)
        self.box_loss = box_loss

    def has_mask(self) -> bool:
        return self._typed_stages()[0].has_mask()

    def forward(
        self,
        features: Features,
        proposals: list[Tensor],
        image_shapes: ImageShapes,
        targets: list[DetectionTarget] | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Interface of torchvision's `RoIHeads`: (detections, {}) in evaluation, ([], losses) in training."""
        if self.training:
            assert targets is not None  # checked by RegionDetector
            return [], self.losses(features, proposals, image_shapes, targets)
        return self.detect(features, proposals, image_shapes), {}

    def losses(
        self, features: Features, proposals: list[Tensor], image_shapes: ImageShapes, targets: list[DetectionTarget]
    ) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = {}
        stages = self._typed_stages()
        for i, (stage, weight) in enumerate(zip(stages, self.loss_weights, strict=True)):
            proposals, matched, labels, target_deltas = stage.select_training_samples(proposals, targets)
            scores, deltas = predict_boxes(stage, features, proposals, image_shapes)
            class_loss, box_loss = fastrcnn_loss(scores, deltas, labels, target_deltas)
            if self.box_loss == "giou":
                box_loss = giou_box_loss(stage, deltas, proposals, labels, target_deltas)
            losses[f"loss_classifier_{i}"] = weight * class_loss
            losses[f"loss_box_reg_{i}"] = weight * box_loss
            if stage.has_mask():
                mask_loss = stage_mask_loss(stage, features, proposals, image_shapes, matched, labels, targets)
                losses[f"loss_mask_{i}"] = weight * mask_loss
            if i + 1 < len(stages):
                refined = refine_proposals(stage, scores.detach(), deltas.detach(), proposals, image_shapes, labels)
                # select_training_samples adds the ground-truth boxes to the proposals of every stage: drop those of
                # this stage, whose target deltas are exactly zero, or the next one gets them twice.
                is_truth = [(kind > 0) & (d == 0).all(1) for kind, d in zip(labels, target_deltas, strict=True)]
                proposals = [boxes[~truth] for boxes, truth in zip(refined, is_truth, strict=True)]
        return losses

    def detect(self, features: Features, proposals: list[Tensor], image_shapes: ImageShapes) -> list[dict[str, Tensor]]:
        stages = self._typed_stages()
        scores, deltas = predict_boxes(stages[0], features, proposals, image_shapes)
        probabilities = [scores.softmax(-1)]
        for previous, stage in pairwise(stages):
            proposals = refine_proposals(previous, scores, deltas, proposals, image_shapes)
            scores, deltas = predict_boxes(stage, features, proposals, image_shapes)
            probabilities.append(scores.softmax(-1))
        # torchvision applies a softmax to its input: of log-probabilities, it returns the probabilities.
        mean_logits = torch.stack(probabilities).mean(0).clamp(min=1e-30).log()
        boxes, scores_per_image, labels = stages[-1].postprocess_detections(
            mean_logits, deltas, proposals, image_shapes
        )
        detections = [
            {"boxes": b, "labels": k, "scores": s} for b, k, s in zip(boxes, labels, scores_per_image, strict=True)
        ]
        if self.has_mask():
            logits = [pooled_mask_logits(stage, features, boxes, image_shapes) for stage in stages]
            masks_per_stage = [maskrcnn_inference(stage_logits, labels) for stage_logits in logits]
            for detection, *masks in zip(detections, *masks_per_stage, strict=True):
                detection["masks"] = torch.stack(masks).mean(0)
        return detections

    def _typed_stages(self) -> list[RoIHeads]:
        return cast("list[RoIHeads]", list(self.stages))  # ModuleList does not type its elements


def pooled_mask_logits(stage: RoIHeads, features: Features, boxes: list[Tensor], image_shapes: ImageShapes) -> Tensor:
    """Mask logits (n, K + 1, 28, 28) of all boxes of all images."""
    assert stage.mask_roi_pool is not None  # callers check has_mask()
    return predict_mask_logits(stage, stage.mask_roi_pool(features, boxes, image_shapes))


def refine_proposals(
    stage: RoIHeads,
    scores: Tensor,
    deltas: Tensor,
    proposals: list[Tensor],
    image_shapes: ImageShapes,
    labels: list[Tensor] | None = None,
) -> list[Tensor]:
    """Apply the box deltas of one class to every proposal and clip to the image.

    The class is the label of a positive proposal, where labels are given, else the object class of the highest score.
    """
    classes = scores[:, 1:].argmax(1) + 1
    if labels is not None:
        true_classes = torch.cat(labels)
        classes = torch.where(true_classes > 0, true_classes, classes)
    boxes = stage.box_coder.decode(deltas, proposals).flatten(1).unflatten(1, (-1, 4))  # (n, K + 1, 4)
    boxes = boxes[torch.arange(len(classes), device=classes.device), classes]
    per_image = boxes.split([len(old) for old in proposals])
    return [clip_boxes_to_image(new, shape) for new, shape in zip(per_image, image_shapes, strict=True)]


def giou_box_loss(
    stage: RoIHeads,
    deltas: Tensor,
    proposals: list[Tensor],
    labels: list[Tensor],
    target_deltas: Sequence[Tensor],
) -> Tensor:
    """1 - GIoU (arXiv 1902.09630) of positive proposals, divided by the number of samples, times 10 (mmdetection)."""
    classes, targets, anchors = torch.cat(labels), torch.cat(list(target_deltas)), torch.cat(proposals)
    positive = torch.where(classes > 0)[0]
    class_deltas = deltas.unflatten(1, (-1, 4))[positive, classes[positive]]
    boxes = stage.box_coder.decode_single(class_deltas, anchors[positive])
    true_boxes = stage.box_coder.decode_single(targets[positive], anchors[positive])
    return GIOU_WEIGHT * generalized_box_iou_loss(boxes, true_boxes, reduction="sum") / max(len(classes), 1)


def stage_mask_loss(
    stage: RoIHeads,
    features: Features,
    proposals: list[Tensor],
    image_shapes: ImageShapes,
    matched: list[Tensor],
    labels: list[Tensor],
    targets: list[DetectionTarget],
) -> Tensor:
    """Mask R-CNN's mask loss on the positive proposals of one stage."""
    positive = [torch.where(kind > 0)[0] for kind in labels]
    boxes = [boxes[index] for boxes, index in zip(proposals, positive, strict=True)]
    matches = [match[index] for match, index in zip(matched, positive, strict=True)]
    true_masks, true_labels = [target["masks"] for target in targets], [target["labels"] for target in targets]
    logits = pooled_mask_logits(stage, features, boxes, image_shapes)
    return maskrcnn_loss(logits, boxes, true_masks, true_labels, matches)


def cascade_mask_rcnn(
    backbone: Pyramid,
    num_classes: int,
    transform: GeneralizedRCNNTransform,
    rpn: RegionProposalNetwork,
    masks: bool = True,
    box_head: str = "conv",
    norm: NormLayer | None = None,
    box_loss: str = "giou",
    loss_weights: Sequence[float] = LOSS_WEIGHTS,
    **settings: Any,
) -> RegionDetector:
    """Three stages on a feature pyramid. Convolutional box heads always have a norm, as in Swin's experiments."""
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
        for iou, weights in zip(IOU_THRESHOLDS, BOX_WEIGHTS, strict=True)
    ]
    return RegionDetector(backbone, rpn, CascadeHeads(stages, loss_weights, box_loss), transform, num_classes)
