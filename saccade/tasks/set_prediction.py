"""DETR's set prediction (arXiv 2005.12872): bipartite matching of predictions and objects, and the set losses.

Boxes are x0 y0 x1 y1 in units of the image. Class 0 is "no object".
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import generalized_box_iou, generalized_box_iou_loss

from saccade._extras import require
from saccade.layers.boxes import centre_and_size


class SetWeights(NamedTuple):
    """Weights of the matching cost and of the losses, with DETR's values; `no_object` weighs class 0."""

    classes: float = 1.0
    distance: float = 5.0
    giou: float = 2.0
    no_object: float = 0.1


class MatchedObjects(NamedTuple):
    """Targets of the n matched predictions of a batch: prediction `prediction` of image `image`."""

    image: Tensor  # (n,)
    prediction: Tensor  # (n,)
    labels: Tensor  # (n,)
    boxes: Tensor  # (n, 4)
    num_objects: Tensor  # (): objects per process, matched or not; the box losses are divided by it


DETR = SetWeights()
Matching = list[tuple[Tensor, Tensor]]  # per image: indices of predictions, and of the objects matched to them


@torch.no_grad()
def match_predictions(
    logits: Tensor,
    boxes: Tensor,
    true_labels: Sequence[Tensor],
    true_boxes: Sequence[Tensor],
    weights: SetWeights = DETR,
) -> Matching:
    """The one-to-one matching of minimal cost (DETR Eq. 1): logits (B, P, K + 1), boxes (B, P, 4) -> CPU indices.

    Batched over images: objects are padded to the largest count, so that one cost tensor is copied from the GPU.
    """
    linear_sum_assignment = require("scipy.optimize", "train").linear_sum_assignment
    counts = [len(labels) for labels in true_labels]
    image = torch.repeat_interleave(torch.tensor(counts))
    slot = torch.cat([torch.arange(count) for count in counts])
    padded_boxes = boxes.new_zeros(len(counts), max(counts), 4)
    padded_labels = torch.zeros(len(counts), max(counts), dtype=torch.long, device=boxes.device)
    padded_boxes[image, slot] = torch.cat(list(true_boxes)).to(boxes.dtype)
    padded_labels[image, slot] = torch.cat(list(true_labels))
    distance = torch.cdist(_to_centre_and_size(boxes), _to_centre_and_size(padded_boxes), p=1)  # (B, P, n)
    probability = logits.softmax(-1).gather(2, padded_labels.unsqueeze(1).expand(-1, boxes.shape[1], -1))
    giou = torch.vmap(generalized_box_iou)(boxes, padded_boxes)
    cost = weights.distance * distance - weights.classes * probability - weights.giou * giou
    # scipy refuses NaN. A float16 overflow must not stop training: the gradient scaler skips the step.
    costs = cost.nan_to_num(1e4, 1e4, -1e4).cpu().numpy()
    pairs = [linear_sum_assignment(rows[:, :count]) for rows, count in zip(costs, counts, strict=True)]
    return [(torch.from_numpy(predictions), torch.from_numpy(objects)) for predictions, objects in pairs]


def gather_targets(matching: Matching, true_labels: Sequence[Tensor], true_boxes: Sequence[Tensor]) -> MatchedObjects:
    """The label and box of every matched prediction."""
    firsts = accumulate((len(labels) for labels in true_labels), initial=0)  # offsets into the concatenated objects
    index = torch.stack([
        torch.repeat_interleave(torch.tensor([len(predictions) for predictions, _ in matching])),
        torch.cat([predictions for predictions, _ in matching]),
        torch.cat([first + objects for first, (_, objects) in zip(firsts, matching, strict=False)]),
    ])  # fmt: skip
    image, prediction, matched = index.to(true_labels[0].device)  # one copy to the device
    return MatchedObjects(
        image=image,
        prediction=prediction,
        labels=torch.cat(list(true_labels))[matched],
        boxes=torch.cat(list(true_boxes))[matched],
        num_objects=_objects_per_process(sum(len(labels) for labels in true_labels), true_labels[0].device),
    )


def set_losses(logits: Tensor, boxes: Tensor, targets: MatchedObjects, weights: SetWeights = DETR) -> dict[str, Tensor]:
    """Weighted cross-entropy over all predictions, L1 and GIoU over the matched ones (DETR Eq. 2)."""
    classes = logits.new_zeros(logits.shape[:2], dtype=torch.long)
    classes[targets.image, targets.prediction] = targets.labels
    class_weights = logits.new_ones(logits.shape[-1])
    class_weights[0] = weights.no_object
    class_loss = F.cross_entropy(logits.flatten(0, 1), classes.flatten(), class_weights)
    matched_boxes, true_boxes = boxes[targets.image, targets.prediction], targets.boxes.to(boxes.dtype)
    distance = F.l1_loss(_to_centre_and_size(matched_boxes), _to_centre_and_size(true_boxes), reduction="sum")
    giou_loss = generalized_box_iou_loss(matched_boxes, true_boxes, reduction="sum")
    return {
        "loss_classifier": weights.classes * class_loss,
        "loss_box_reg": weights.distance * distance / targets.num_objects,
        "loss_giou": weights.giou * giou_loss / targets.num_objects,
    }


def _to_centre_and_size(boxes: Tensor) -> Tensor:
    """Corners (..., 4) -> centre and size (..., 4), in which DETR computes L1."""
    return torch.cat(centre_and_size(boxes), -1)


def _objects_per_process(count: int, device: torch.device) -> Tensor:
    total = torch.tensor(float(count), device=device)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(total)
        total = total / torch.distributed.get_world_size()
    return total.clamp(min=1)
