"""Losses against the formulas, written as loops."""

import math

import pytest
import torch
import torch.nn.functional as F
from torchvision.ops import sigmoid_focal_loss

from saccade.tasks.losses import balanced_weights, class_loss, dice_loss, label_loss, positive_weights
from saccade.tasks.segmentation import pixel_loss

GENERATOR = torch.Generator().manual_seed(0)
LOGITS, LABELS = torch.randn(6, 3, generator=GENERATOR), torch.tensor([0, 2, 1, 1, 0, 2])
WEIGHT = torch.tensor([0.5, 2.0, 1.0])


@pytest.mark.parametrize("gamma", [0.0, 2.0])
@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_class_loss_matches_formula(weight, gamma):
    """Focal loss, Eq. 4: -w (1 - p) ** gamma log p, averaged with the weights."""
    total = norm = 0.0
    for logits, label in zip(LOGITS.tolist(), LABELS.tolist(), strict=True):
        p = math.exp(logits[label]) / sum(map(math.exp, logits))
        w = 1.0 if weight is None else float(weight[label])
        total, norm = total - w * (1 - p) ** gamma * math.log(p), norm + w
    assert float(class_loss(LOGITS, LABELS, weight, gamma)) == pytest.approx(total / norm, rel=1e-5)


@pytest.mark.parametrize("gamma", [0.0, 2.0])
def test_class_loss_of_probabilities_equals_that_of_labels(gamma):
    one_hot = F.one_hot(LABELS, 3).float()
    torch.testing.assert_close(class_loss(LOGITS, one_hot, None, gamma), class_loss(LOGITS, LABELS, None, gamma))


def test_unlabelled_targets_are_left_out():
    labels = torch.cat([LABELS, torch.tensor([255, 255])])
    logits = torch.cat([LOGITS, torch.randn(2, 3, generator=GENERATOR)])
    for weight in (None, WEIGHT):
        expected = class_loss(LOGITS, LABELS, weight, 1.5)
        torch.testing.assert_close(class_loss(logits, labels, weight, 1.5, ignore_index=255), expected)
    assert float(class_loss(LOGITS, torch.full((6,), 255), WEIGHT, ignore_index=255)) == 0


def test_dice_loss_matches_formula():
    logits = torch.randn(2, 3, 4, 5, generator=GENERATOR)
    masks = torch.randint(0, 2, (2, 4, 5), generator=GENERATOR)  # class 2 does not occur
    masks[0, 0] = 255
    p, scores = logits.softmax(1), []
    for k in (0, 1):
        overlap = size = 0.0
        for b in range(2):
            for y in range(4):
                for x in range(5):
                    if masks[b, y, x] != 255:
                        overlap += float(p[b, k, y, x]) * (int(masks[b, y, x]) == k)
                        size += float(p[b, k, y, x]) + (int(masks[b, y, x]) == k)
        scores.append((2 * overlap + 1) / (size + 1))
    assert float(dice_loss(logits, masks)) == pytest.approx(1 - sum(scores) / 2, rel=1e-5)
    perfect = 50.0 * F.one_hot(masks.where(masks != 255, 0), 3).movedim(-1, 1)
    assert float(dice_loss(perfect, masks)) == pytest.approx(0, abs=1e-5)
    assert float(dice_loss(logits, torch.full_like(masks, 255))) == 0


def test_pixel_loss_adds_the_dice_loss():
    logits, masks = torch.randn(1, 3, 4, 4, generator=GENERATOR), torch.randint(0, 3, (1, 4, 4), generator=GENERATOR)
    torch.testing.assert_close(
        pixel_loss(logits, masks, dice=0.5), F.cross_entropy(logits, masks) + 0.5 * dice_loss(logits, masks)
    )


def test_balanced_weights_give_every_class_the_same_total():
    weights, counts = balanced_weights(torch.tensor([10, 30, 0, 60])), torch.tensor([10, 30, 0, 60])
    torch.testing.assert_close(weights * counts, torch.tensor([100.0, 100.0, 0.0, 100.0]) / 3)
    assert weights[2] == 1


@pytest.mark.parametrize("targets", [F.one_hot(LABELS, 3).float(), torch.rand(6, 3, generator=GENERATOR)])
def test_label_loss_matches_torch_and_torchvision(targets):
    loss = torch.nn.BCEWithLogitsLoss(pos_weight=WEIGHT)
    torch.testing.assert_close(label_loss(LOGITS, targets, WEIGHT).mean(), loss(LOGITS, targets))
    focal = sigmoid_focal_loss(LOGITS, targets, alpha=-1, gamma=2.0, reduction="mean")
    torch.testing.assert_close(label_loss(LOGITS, targets, focal_gamma=2.0).mean(), focal)


def test_positive_weights_balance_present_and_absent():
    assert positive_weights(torch.tensor([2, 8, 0]), 10).tolist() == [4.0, 0.25, 1.0]
