"""DETR's matching and losses against slow loops written from its equations."""

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from saccade.tasks.set_prediction import DETR, SetWeights, gather_targets, match_predictions, set_losses


def random_set(answers: int, objects: list[int], classes: int = 3, seed: int = 0):
    dice = torch.Generator().manual_seed(seed)

    def boxes(*shape):
        centre, side = torch.rand(*shape, 2, generator=dice), 0.05 + torch.rand(*shape, 2, generator=dice)
        return torch.cat([centre - side / 2, centre + side / 2], -1)

    logits = torch.randn(len(objects), answers, classes + 1, generator=dice)
    labels = [torch.randint(1, classes + 1, (count,), generator=dice) for count in objects]
    return logits, boxes(len(objects), answers), labels, [boxes(count) for count in objects]


def giou(a: list[float], b: list[float]) -> float:
    """Overlap over union, less the empty share of the hull (arXiv 1902.09630)."""

    def area(box):
        return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])

    inner = area([max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])])
    hull = area([min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])])
    union = area(a) + area(b) - inner
    return inner / union - (hull - union) / hull


def distance(a: list[float], b: list[float]) -> float:
    """L1 between centres and sizes."""

    def centred(box):
        return [(box[0] + box[2]) / 2, (box[1] + box[3]) / 2, box[2] - box[0], box[3] - box[1]]

    return sum(abs(p - q) for p, q in zip(centred(a), centred(b), strict=True))


def pair_cost(logits, box, label, true) -> float:
    return 5 * distance(box, true) - 2 * giou(box, true) - float(logits.softmax(0)[label])


def losses_of(logits, boxes, labels, true) -> dict[str, torch.Tensor]:
    return set_losses(logits, boxes, gather_targets(match_predictions(logits, boxes, labels, true), labels, true))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), objects=st.integers(1, 4))
def test_the_matching_is_the_cheapest_of_all(seed, objects):
    logits, boxes, (labels,), (true,) = random_set(4, [objects], seed=seed)
    ((answers, chosen),) = match_predictions(logits, boxes, [labels], [true])

    def cost(order):
        pairs = enumerate(order)
        return sum(pair_cost(logits[0, a], boxes[0, a].tolist(), labels[k], true[k].tolist()) for k, a in pairs)

    best = min(cost(order) for order in permutations(range(4), objects))
    order = [0] * objects
    for answer, k in zip(answers.tolist(), chosen.tolist(), strict=True):
        order[k] = answer
    assert cost(order) == pytest.approx(best, abs=1e-4)
    assert sorted(chosen.tolist()) == list(range(objects))


def test_the_losses_are_detrs():
    logits, boxes, labels, true = random_set(5, [2, 0, 3])
    found = losses_of(logits, boxes, labels, true)
    pairs = match_predictions(logits, boxes, labels, true)
    by_box = by_giou = by_class = weight = 0.0
    for i, (answers, objects) in enumerate(pairs):
        wanted = dict(zip(answers.tolist(), objects.tolist(), strict=True))
        for a in range(5):
            kind = int(labels[i][wanted[a]]) if a in wanted else 0
            share = 1.0 if a in wanted else 0.1
            by_class += share * float(cross_entropy(logits[i, a][None], torch.tensor([kind])))
            weight += share
            if a in wanted:
                place, object_ = boxes[i, a].tolist(), true[i][wanted[a]].tolist()
                by_box += distance(place, object_)
                by_giou += 1 - giou(place, object_)
    assert float(found["loss_classifier"]) == pytest.approx(by_class / weight, rel=1e-5)
    assert float(found["loss_box_reg"]) == pytest.approx(5 * by_box / 5, rel=1e-5)
    assert float(found["loss_giou"]) == pytest.approx(2 * by_giou / 5, rel=1e-5)


def test_right_answers_cost_nothing_but_doubt():
    _, _, labels, true = random_set(3, [3])
    logits = torch.full((1, 3, 4), -30.0)
    logits[0, torch.arange(3), labels[0]] = 30.0
    losses = losses_of(logits, true[0][None], labels, true)
    assert all(float(loss) < 1e-5 for loss in losses.values())


def test_no_object_anywhere_teaches_to_say_so():
    logits, boxes, labels, true = random_set(4, [0, 0])
    logits.requires_grad_()
    losses = losses_of(logits, boxes, labels, true)
    assert losses["loss_box_reg"] == losses["loss_giou"] == 0
    losses["loss_classifier"].backward()
    assert (logits.grad[..., 0] < 0).all()  # class 0 is to grow


def test_more_objects_than_answers_leave_some_unmatched():
    logits, boxes, labels, true = random_set(3, [7])
    ((answers, objects),) = match_predictions(logits, boxes, labels, true)
    assert sorted(answers.tolist()) == [0, 1, 2]
    assert len(set(objects.tolist())) == 3
    losses = losses_of(logits, boxes, labels, true)
    assert all(loss.isfinite() for loss in losses.values())


def test_an_overflow_does_not_stop_the_run():
    logits, boxes, labels, true = random_set(4, [2])
    logits[0, 1] = float("nan")
    ((answers, _),) = match_predictions(logits, boxes, labels, true)
    assert 1 not in answers.tolist()


def test_the_weights_are_detrs():
    assert SetWeights(1.0, 5.0, 2.0, 0.1) == DETR
