"""Detectors show their tokens like the backbones they stand on."""

import torch

import saccade
from saccade.data.objects import SceneObjects

SMALL = dict(min_size=64, max_size=64, width=16, norm="group")


def test_a_region_detector_shows_the_tokens_of_its_backbone():
    torch.manual_seed(0)
    model = saccade.create_detector("svit_nano", "mask_rcnn", 3, **SMALL)
    found = saccade.explain(SceneObjects(1, 64).read(0), model, importance=())
    (image,) = found.images
    assert image.figures
    assert image.steps[0]["name"] == "stages.0.blocks.0"
    assert image.answers == []  # a backbone has no classes of its own


def test_a_sparse_detector_shows_where_all_its_tokens_look():
    torch.manual_seed(0)
    model = saccade.create_detector("sparseformer_nano", "sparse", 3, num_tokens=20, detect_tokens=9)
    (image,) = saccade.explain(SceneObjects(1, 64).read(0), model, importance=()).images
    assert {step["tokens"] for step in image.steps} == {20}
    assert image.figures
