"""DETR's matching and losses against loops written from its Eqs. 1-2."""

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from saccade.tasks.set_prediction import DETR, SetWeights, gather_targets, match_predictions, set_losses


def random_set(predictions: int, objects: list[int], classes: int = 3, seed: int = 0):
    rng = torch.Generator().manual_seed(seed)

    def boxes(*shape):
        centre, side = torch.rand(*shape, 2, generator=rng), 0.05 + torch.rand(*shape, 2, generator=rng)
        return torch.cat([centre - side / 2, centre + side / 2], -1)

    logits = torch.randn(len(objects), predictions, classes + 1, generator=rng)
    labels = [torch.randint(1, classes + 1, (count,), generator=rng) for count in objects]
    return logits, boxes(len(objects), predictions), labels, [boxes(count) for count in objects]


def giou(a: list[float], b: list[float]) -> float:
    """IoU minus the empty fraction of the hull (arXiv 1902.09630)."""

    def area(box):
        return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])

    inner = area([max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])])
    hull = area([min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])])
    union = area(a) + area(b) - inner
    return inner / union - (hull - union) / hull


def distance(a: list[float], b: list[float]) -> float:
    """L1 between centres and sizes."""

    def centre_and_size(box):
        return [(box[0] + box[2]) / 2, (box[1] + box[3]) / 2, box[2] - box[0], box[3] - box[1]]

    return sum(abs(p - q) for p, q in zip(centre_and_size(a), centre_and_size(b), strict=True))


def pair_cost(logits, box, label, true) -> float:
    return 5 * distance(box, true) - 2 * giou(box, true) - float(logits.softmax(0)[label])


def losses_of(logits, boxes, labels, true) -> dict[str, torch.Tensor]:
    return set_losses(logits, boxes, gather_targets(match_predictions(logits, boxes, labels, true), labels, true))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), objects=st.integers(1, 4))
@pytest.mark.shows("SF-69")
def test_matching_has_minimal_cost(seed, objects):
    logits, boxes, (labels,), (true,) = random_set(4, [objects], seed=seed)
    ((predictions, chosen),) = match_predictions(logits, boxes, [labels], [true])

    def cost(order):
        pairs = enumerate(order)
        return sum(pair_cost(logits[0, a], boxes[0, a].tolist(), labels[k], true[k].tolist()) for k, a in pairs)

    best = min(cost(order) for order in permutations(range(4), objects))
    order = [0] * objects
    for prediction, k in zip(predictions.tolist(), chosen.tolist(), strict=True):
        order[k] = prediction
    assert cost(order) == pytest.approx(best, abs=1e-4)
    assert sorted(chosen.tolist()) == list(range(objects))


@pytest.mark.shows("SF-69")
def test_losses_match_a_loop_over_predictions():
    logits, boxes, labels, true = random_set(5, [2, 0, 3])
    losses = losses_of(logits, boxes, labels, true)
    pairs = match_predictions(logits, boxes, labels, true)
    by_box = by_giou = by_class = weight = 0.0
    for i, (predictions, objects) in enumerate(pairs):
        matched = dict(zip(predictions.tolist(), objects.tolist(), strict=True))
        for a in range(5):
            kind = int(labels[i][matched[a]]) if a in matched else 0
            weight_of_prediction = 1.0 if a in matched else 0.1
            by_class += weight_of_prediction * float(cross_entropy(logits[i, a][None], torch.tensor([kind])))
            weight += weight_of_prediction
            if a in matched:
                place, object_ = boxes[i, a].tolist(), true[i][matched[a]].tolist()
                by_box += distance(place, object_)
                by_giou += 1 - giou(place, object_)
    assert float(losses["loss_classifier"]) == pytest.approx(by_class / weight, rel=1e-5)
    assert float(losses["loss_box_reg"]) == pytest.approx(5 * by_box / 5, rel=1e-5)
    assert float(losses["loss_giou"]) == pytest.approx(2 * by_giou / 5, rel=1e-5)


def test_correct_predictions_have_zero_loss():
    _, _, labels, true = random_set(3, [3])
    logits = torch.full((1, 3, 4), -30.0)
    logits[0, torch.arange(3), labels[0]] = 30.0
    losses = losses_of(logits, true[0][None], labels, true)
    assert all(float(loss) < 1e-5 for loss in losses.values())


def test_batch_without_objects_raises_class_0():
    logits, boxes, labels, true = random_set(4, [0, 0])
    logits.requires_grad_()
    losses = losses_of(logits, boxes, labels, true)
    assert losses["loss_box_reg"] == losses["loss_giou"] == 0
    losses["loss_classifier"].backward()
    assert (logits.grad[..., 0] < 0).all()


def test_more_objects_than_predictions_leave_some_unmatched():
    logits, boxes, labels, true = random_set(3, [7])
    ((predictions, objects),) = match_predictions(logits, boxes, labels, true)
    assert sorted(predictions.tolist()) == [0, 1, 2]
    assert len(set(objects.tolist())) == 3
    losses = losses_of(logits, boxes, labels, true)
    assert all(loss.isfinite() for loss in losses.values())


def test_nan_logits_are_matched_last():
    logits, boxes, labels, true = random_set(4, [2])
    logits[0, 1] = float("nan")
    ((predictions, _),) = match_predictions(logits, boxes, labels, true)
    assert 1 not in predictions.tolist()


@pytest.mark.shows("SF-69")
def test_default_weights_are_detrs():
    assert SetWeights(1.0, 5.0, 2.0, 0.1) == DETR
