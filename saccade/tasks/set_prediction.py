"""Objects as a set, as in DETR (arXiv 2005.12872): each true object is matched with one answer, the others say none.

Boxes are x0 y0 x1 y1 in units of the image. Class 0 is no object.
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
    """DETR's values (SF-69), for matching and for the loss alike; `no_object` weighs the class of what matches none."""

    classes: float = 1.0
    distance: float = 5.0
    giou: float = 2.0
    no_object: float = 0.1


class Matched(NamedTuple):
    """All pairs of a batch: answer `answer` of image `image` is to say `labels` and `boxes`."""

    image: Tensor  # (n,)
    answer: Tensor  # (n,)
    labels: Tensor  # (n,)
    boxes: Tensor  # (n, 4)
    objects: Tensor  # (): objects per process, matched or not, that losses are divided by


DETR = SetWeights()
Pairs = list[tuple[Tensor, Tensor]]  # of every image: which answers, and the objects they are matched with


@torch.no_grad()
def match(
    logits: Tensor, boxes: Tensor, labels: Sequence[Tensor], true: Sequence[Tensor], weights: SetWeights = DETR
) -> Pairs:
    """The cheapest pairs of answers and objects, one to one; logits (B, P, K + 1), boxes (B, P, 4). Pairs on the CPU.

    All images at once: lists of objects are filled up to the longest, and one table comes from the GPU.
    """
    assign = require("scipy.optimize", "train").linear_sum_assignment
    counts = [len(label) for label in labels]
    image = torch.repeat_interleave(torch.tensor(counts))
    slot = torch.cat([torch.arange(count) for count in counts])
    places = boxes.new_zeros(len(counts), max(counts), 4)
    kinds = torch.zeros(len(counts), max(counts), dtype=torch.long, device=boxes.device)
    places[image, slot], kinds[image, slot] = torch.cat(list(true)).to(boxes.dtype), torch.cat(list(labels))
    distance = torch.cdist(_centred(boxes), _centred(places), p=1)  # (B, P, n)
    probability = logits.softmax(-1).gather(2, kinds.unsqueeze(1).expand(-1, boxes.shape[1], -1))
    overlap = torch.vmap(generalized_box_iou)(boxes, places)
    cost = weights.distance * distance - weights.classes * probability - weights.giou * overlap
    # An overflow of float16 must not stop the run, the scaler will skip the step.
    table = cost.nan_to_num(1e4, 1e4, -1e4).cpu().numpy()
    found = [assign(rows[:, :count]) for rows, count in zip(table, counts, strict=True)]
    return [(torch.from_numpy(answers), torch.from_numpy(objects)) for answers, objects in found]


def join(pairs: Pairs, labels: Sequence[Tensor], true: Sequence[Tensor]) -> Matched:
    """What every matched answer is to say."""
    firsts = accumulate((len(label) for label in labels), initial=0)  # in the list of all objects
    index = torch.stack([
        torch.repeat_interleave(torch.tensor([len(answers) for answers, _ in pairs])),
        torch.cat([answers for answers, _ in pairs]),
        torch.cat([first + objects for first, (_, objects) in zip(firsts, pairs, strict=False)]),
    ])  # fmt: skip
    image, answer, chosen = index.to(labels[0].device)  # one transfer
    return Matched(
        image=image,
        answer=answer,
        labels=torch.cat(list(labels))[chosen],
        boxes=torch.cat(list(true))[chosen],
        objects=_objects_per_process(sum(len(label) for label in labels), labels[0].device),
    )


def set_losses(logits: Tensor, boxes: Tensor, matched: Matched, weights: SetWeights = DETR) -> dict[str, Tensor]:
    """Cross-entropy over all answers, L1 and GIoU over the matched ones, weighted; divided by objects per process."""
    wanted = logits.new_zeros(logits.shape[:2], dtype=torch.long)
    wanted[matched.image, matched.answer] = matched.labels
    balance = logits.new_ones(logits.shape[-1])
    balance[0] = weights.no_object
    by_class = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), balance)
    found, places, objects = boxes[matched.image, matched.answer], matched.boxes.to(boxes.dtype), matched.objects
    return {
        "loss_classifier": weights.classes * by_class,
        "loss_box_reg": weights.distance * F.l1_loss(_centred(found), _centred(places), reduction="sum") / objects,
        "loss_giou": weights.giou * generalized_box_iou_loss(found, places, reduction="sum") / objects,
    }


def _centred(boxes: Tensor) -> Tensor:
    """Corners -> centre and size, in which DETR measures distance."""
    return torch.cat(centre_and_size(boxes), -1)


def _objects_per_process(count: int, device: torch.device) -> Tensor:
    total = torch.tensor(float(count), device=device)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(total)
        total = total / torch.distributed.get_world_size()
    return total.clamp(min=1)
