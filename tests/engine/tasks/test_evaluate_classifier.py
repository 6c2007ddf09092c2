"""Evaluation of classifiers."""

import pytest
import torch

from saccade.data.loader import Batch
from saccade.engine.tasks.evaluate_classifier import evaluate_classifier
from saccade.models.card import Preprocess


class Brightness(torch.nn.Module):
    """Two logits: the mean of the image and 0."""

    def forward(self, images):
        mean = images.flatten(1).mean(1)
        return torch.stack([mean, torch.zeros_like(mean)], 1)


def test_metrics_per_image():
    preprocess = Preprocess(4, (0.5,) * 3, (0.25,) * 3)
    images = torch.tensor([255, 255, 0, 0], dtype=torch.uint8).view(4, 1, 1, 1).expand(4, 3, 4, 4)
    empty = Batch(images[:0], torch.tensor([]).long(), torch.tensor([]).long(), [(9, "damaged")])
    full = Batch(images, torch.tensor([0, 1, 1, 1]), torch.tensor([4, 5, 6, 7]), [])
    result = evaluate_classifier(Brightness(), [empty, full], 2, preprocess)
    assert result.summary() | {"loss": 0, "calibration": 0} == {
        "count": 4, "loss": 0, "top1": 75.0, "top5": 100.0, "calibration": 0, "bad": 1
    }  # fmt: skip
    assert result.confusion.tolist() == [[1, 0], [1, 2]]
    assert result.per_class == pytest.approx([100.0, 200 / 3])
    assert (result.indices.tolist(), result.predicted.tolist()) == ([4, 5, 6, 7], [0, 0, 1, 1])
    logits = torch.tensor([2.0, 2.0, -2.0, -2.0])
    torch.testing.assert_close(result.confidence, torch.sigmoid(logits.abs()))
    torch.testing.assert_close(result.losses, -torch.sigmoid(torch.tensor([2.0, -2.0, 2.0, 2.0])).log())
    with pytest.raises(ValueError, match="no image could be evaluated"):
        evaluate_classifier(Brightness(), [empty], 2, preprocess)
