"""Parameters and multiply-adds."""

import pytest
import torch
from torch import nn

import saccade
from saccade.benchmark import Cost, count
from saccade.heads.fpn import FPN
from saccade.heads.vt_fpn import VTPyramid
from saccade.tokens.visual_tokens import RecurrentTokenizer


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.fc = nn.Linear(8, 5)

    def forward(self, images):
        return self.fc(self.conv(images).mean((2, 3)))


@pytest.mark.shows("X-02")
def test_multiply_adds_follow_from_the_layers():
    cost = count(Convolution(), 16)
    assert cost.params == 3 * 8 * 9 + 8 * 5 + 5
    assert cost.madds == 16 * 16 * 3 * 8 * 9 + 8 * 5
    assert count(Convolution(), (16, 32)).madds == 2 * 16 * 16 * 3 * 8 * 9 + 8 * 5


def test_model_can_be_given_by_name_and_stays_on_its_device():
    model = saccade.create_model("svit_nano", num_classes=7)
    assert count(model, 64) == count("svit_nano", 64, num_classes=7)
    assert next(model.parameters()).device == torch.device("cpu")
    assert model.training


def test_video_model_gets_its_frames():
    full = count("video_sparseformer_nano", 64)
    frames = saccade.create_model("video_sparseformer_nano").pretrained_cfg["input_size"][1]
    assert count("video_sparseformer_nano", (3, frames, 64, 64)) == full


def test_other_input_channels_are_counted():
    rgb, grey = (count("svit_nano", 64, in_chans=channels) for channels in (3, 1))
    assert rgb.params > grey.params
    assert rgb.madds > grey.madds


@pytest.mark.parametrize("size", [64, 128])
def test_cost_of_a_classifier_is_counted_per_image(size):
    assert count("vt_nano", size).madds == count("vt_nano", (3, size, size)).madds


def test_parts_add_up_to_the_model():
    for name in ("svit_nano", "paca_nano", "sparseformer_nano", "vt_nano", "resnet18"):
        cost = count(name, 64)
        assert sum(part.params for part in cost.parts.values()) == cost.params
        assert sum(part.madds for part in cost.parts.values()) == cost.madds


@pytest.mark.shows("X-02")
def test_stages_are_counted_one_by_one():
    cost = count("svit_small")
    assert list(cost.parts) == ["stem", "stages.0", "stages.1", "stages.2", "stages.3", "projection", "head"]
    assert cost.parts["head"] == Cost(1024 * 1000 + 1000, 1024 * 1000)
    parts = count("vt_resnet18").parts
    assert list(parts) == ["conv1", "layer1", "layer2", "layer3", "layer4", "head", "other"]
    assert parts["conv1"] == Cost(64 * 3 * 49, 64 * 3 * 49 * 112**2)
    assert parts["other"] == Cost(2 * 64, 0)  # the norm of the stem


def test_cost_prints_its_totals_and_the_names_of_its_parts():
    cost = Cost(7, 9, {"stem": Cost(3, 4), "head": Cost(4, 5)})
    assert repr(cost) == "Cost(params=7, madds=9, parts of stem, head)"
    assert repr(cost.parts["stem"]) == "Cost(params=3, madds=4)"


@pytest.mark.shows("X-02")
def test_any_module_is_counted_on_its_inputs():
    """Tokenizers, pyramids and heads: shapes come from the tensors, which stay where they are."""
    tokenizer = RecurrentTokenizer(64, 32, num_heads=4)
    cost = count(tokenizer, inputs=(torch.empty(1, 64, 7, 7), torch.empty(1, 6, 32)))
    assert cost.params == sum(parameter.numel() for parameter in tokenizer.parameters())
    assert cost.madds == 3 * 32 * 64 + 49 * 2 * 64 * 64 + 2 * 49 * 3 * 64 + 3 * 64 * 32
    levels = [torch.empty(1, 16 * 2**i, 32 // 2**i, 32 // 2**i) for i in range(4)]
    pyramid = FPN([16, 32, 64, 128], 8)
    pixels = [level.shape[2] ** 2 for level in levels]
    convolutions = sum(n * (16 * 2**i * 8 + 9 * 8 * 8) for i, n in enumerate(pixels))
    assert count(pyramid, inputs=(levels,)).madds == convolutions
    neck = VTPyramid([16, 32, 64, 128], 16, token_dim=32, num_tokens=2, num_heads=4)
    assert list(count(neck, inputs=(levels,)).parts) == ["layers.0"]
    segmenter = saccade.create_segmenter("svit_nano", "fpn", 5)
    assert list(count(segmenter, 64).parts) == ["backbone", "head"]
