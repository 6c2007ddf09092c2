"""Detectors: their predictions, and the tokens of their backbones."""

import pytest
import torch
from torch import nn

import saccade
from saccade.data.synthetic.scenes import SceneObjects
from saccade.explanation.figures.detections import detection_figure, scale_detections
from saccade.explanation.images import View
from tests.explanation.planted import view

SMALL = dict(min_size=64, max_size=64, width=16, norm="group")


class FixedDetector(nn.Module):
    """One confident and one weak detection in every image."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, images):
        assert not self.training
        boxes = torch.tensor([[4.0, 8, 12, 24], [0, 0, 8, 8]])
        return [{"boxes": boxes, "labels": torch.tensor([1, 2]), "scores": torch.tensor([0.9, 0.4])} for _ in images]


def test_detection_figure_counts_confident_detections():
    detector = FixedDetector().train()
    figure = detection_figure(detector, view(32, 32, 0), ["cat", "dog"], "a_model")
    assert figure.name == "detections"
    assert figure.panels[1].label == "1 cat"
    assert figure.caption == "a_model detects 1 cat with a score of at least 0.5."
    assert detector.training


def test_detections_are_scaled_to_the_canvas():
    small = view(32, 32)
    large = View("large", small.image, view(64, 96).canvas)
    scaled = scale_detections({"boxes": torch.tensor([[4.0, 8, 12, 24]]), "masks": torch.ones(1, 1, 32, 32)}, large)
    assert scaled["boxes"].tolist() == [[12, 16, 36, 48]]
    assert scaled["masks"].shape == (1, 1, 64, 96)


@pytest.mark.parametrize(
    ("backbone", "head", "options", "tokens"),
    [
        ("svit_nano", "mask_rcnn", SMALL, {16}),
        ("sparseformer_nano", "sparse", dict(num_tokens=20, detect_tokens=9), {20}),
    ],
)
def test_detector_is_explained_by_its_backbone(backbone, head, options, tokens):
    torch.manual_seed(0)
    model = saccade.create_detector(backbone, head, 3, **options)
    (image,) = saccade.explain(SceneObjects(1, 64).read(0), model, importance=()).images
    assert list(image.figures)[:2] == ["detections", "mosaic"]
    assert {step["tokens"] for step in image.steps} == tokens
    assert image.predictions == []  # a backbone has no classes
