"""Parameters and multiply-adds."""

import pytest
import torch
from torch import nn

import saccade
from saccade.benchmark import count


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
