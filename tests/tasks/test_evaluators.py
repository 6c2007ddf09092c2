"""Evaluators of all tasks: metrics, values per image, unreadable images."""

import numpy as np
import pytest
import torch

from saccade.data.loader import Batch, ObjectEvalLoader, UnreadableImages
from saccade.data.sources.base import DataError
from saccade.data.synthetic.scenes import SceneObjects
from saccade.engine.evaluate import check_num_classes
from saccade.engine.train import assemble
from saccade.models.card import Card, Preprocess
from saccade.tasks.evaluators import ClassEvaluator, LabelEvaluator, ObjectEvaluator, detection_quality, has_masks
from tests.engine.tasks.test_detect import recipe


class Brightness(torch.nn.Module):
    """Two logits: the mean of the image and 0."""

    def forward(self, images):
        mean = images.flatten(1).mean(1)
        return torch.stack([mean, torch.zeros_like(mean)], 1)


EVALUATOR = ClassEvaluator(2, Preprocess(4, (0.5,) * 3, (0.25,) * 3))
IMAGES = torch.tensor([255, 255, 0, 0], dtype=torch.uint8).view(4, 1, 1, 1).expand(4, 3, 4, 4)
FULL = Batch(IMAGES, torch.tensor([0, 1, 1, 1]), torch.tensor([4, 5, 6, 7]), [])


def unreadable(*reasons: tuple[int, str]) -> Batch:
    return Batch(IMAGES[:0], torch.tensor([]).long(), torch.tensor([]).long(), list(reasons))


def test_metrics_per_image():
    result = EVALUATOR.evaluate(Brightness(), [unreadable((9, "damaged")), FULL])
    losses = -torch.sigmoid(torch.tensor([2.0, -2.0, 2.0, 2.0])).log()
    assert result.summary() | {"calibration": 0} == {
        "count": 4, "loss": round(float(losses.mean()), 4), "top1": 75.0, "top5": 100.0, "calibration": 0, "bad": 1
    }  # fmt: skip
    assert result.confusion.tolist() == [[1, 0], [1, 2]]
    assert result.per_class == pytest.approx([100.0, 200 / 3])
    images = result.images
    assert (images["indices"].tolist(), images["predicted"].tolist()) == ([4, 5, 6, 7], [0, 0, 1, 1])
    torch.testing.assert_close(images["confidence"], torch.sigmoid(torch.full((4,), 2.0)))
    torch.testing.assert_close(images["losses"], losses)
    assert EVALUATOR.evaluate(Brightness(), [FULL]).metrics == result.metrics, "a second evaluation starts anew"


def test_unreadable_images_are_counted_up_to_a_limit():
    counted = UnreadableImages(3)
    result = EVALUATOR.evaluate(Brightness(), [unreadable((0, "a")), FULL, unreadable((4, "b"))], unreadable=counted)
    assert (result.bad, counted.reasons) == (2, {"evaluation 0": "a", "evaluation 4": "b"})
    with pytest.raises(DataError, match="2 images cannot be read"):
        EVALUATOR.evaluate(Brightness(), [unreadable((0, "a"), (1, "b"))], unreadable=UnreadableImages(1))
    with pytest.raises(ValueError, match="no image could be evaluated"):
        EVALUATOR.evaluate(Brightness(), [unreadable((0, "a"))])


def test_process_without_images_has_empty_values():
    """In a distributed validation with fewer images than processes; metrics then come from the others."""
    evaluator = ClassEvaluator(2, Preprocess(4), sync=True)
    evaluator.reset("cpu")
    values = evaluator.image_values()
    assert {name: len(value) for name, value in values.items()} == dict.fromkeys(ClassEvaluator.columns, 0)


def test_number_of_classes_must_match():
    card = Card("svit_nano", 10, {}, [], Preprocess())
    check_num_classes(card, [str(i) for i in range(10)])
    with pytest.raises(DataError, match=r"^the model has 10 classes, the data has 200\.$"):
        check_num_classes(card, [str(i) for i in range(200)])


def test_data_without_objects_has_zero_ap():
    class Empty(SceneObjects):
        def objects(self, index, size=None):
            return super().objects(index).select(np.array([], int))

    source, model = Empty(2, 48, "val"), assemble(recipe()).model
    evaluator = ObjectEvaluator(source, has_masks(model, source))
    result = evaluator.evaluate(model, ObjectEvalLoader(source, 2, 0))
    assert result.metrics == {"box_ap": 0.0}
    assert result.per_class == [None] * 10


def test_detection_quality():
    true = torch.tensor([[0.0, 0, 10, 10], [20, 20, 30, 30]])
    assert detection_quality(true, true) == 1.0
    assert detection_quality(true[:1], true) == 0.5
    assert detection_quality(torch.cat([true, true + 50]), true) == 0.5  # two detected, two false
    assert detection_quality(true[:0], true) == 0.0
    assert detection_quality(true[:0], true[:0]) == 1.0
    assert detection_quality(true, true[:0]) == 0.0


class Ranks(torch.nn.Module):
    """Brighter images have larger scores, the same for three classes."""

    def forward(self, images):
        return images.flatten(1).mean(1, keepdim=True).expand(-1, 3)


def test_label_evaluator_matches_average_precision_by_hand():
    """Class 0 is right at ranks 1 and 3, class 1 at ranks 2 and 4, class 2 nowhere and left out."""
    images = torch.tensor([250, 200, 150, 100], dtype=torch.uint8).view(4, 1, 1, 1).expand(4, 3, 4, 4)
    labels = torch.tensor([[1.0, 0, 0], [0, 1, 0], [1, 0, 0], [0, 1, 0]])
    evaluator = LabelEvaluator(3, Preprocess(4, (0.5,) * 3, (0.25,) * 3))
    batches = [Batch(images[i::2], labels[i::2], torch.arange(4)[i::2], []) for i in (0, 1)]
    evaluation = evaluator.evaluate(Ranks(), batches)
    first, second = (1 / 1 + 2 / 3) / 2, (1 / 2 + 2 / 4) / 2
    assert evaluation.per_class == [pytest.approx(100 * first), pytest.approx(100 * second), None]
    assert evaluation.metrics["map"] == pytest.approx(50 * (first + second))
    precision, recall = (2 / 3, 1 / 3), (1, 1 / 2)  # the darkest image is below 0.5
    f1 = [2 * p * r / (p + r) for p, r in zip(precision, recall, strict=True)]
    assert evaluation.metrics["f1"] == pytest.approx(100 * sum(f1) / 2)
    logits = (images[:, 0, 0, 0].float() / 255 - 0.5) / 0.25
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits[:, None].expand(4, 3), labels)
    assert evaluation.metrics["loss"] == pytest.approx(float(expected))
    assert evaluation.images["indices"].tolist() == [0, 2, 1, 3]
    assert evaluation.images["scores"].shape == (4, 3)
