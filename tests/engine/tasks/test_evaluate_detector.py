"""Evaluation of detectors."""

import numpy as np
import torch

from saccade.data.loader import ObjectEvalLoader
from saccade.data.synthetic.scenes import SceneObjects
from saccade.engine.tasks.evaluate_detector import coco_metric, detection_quality, evaluate_detector
from saccade.engine.train import assemble
from tests.engine.tasks.test_detect import recipe


def test_data_without_objects_has_zero_ap():
    class Empty(SceneObjects):
        def objects(self, index, size=None):
            return super().objects(index).select(np.array([], int))

    source, model = Empty(2, 48, "val"), assemble(recipe()).model
    result = evaluate_detector(model, ObjectEvalLoader(source, 2, 0), source, coco_metric(model, source, 100))
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
