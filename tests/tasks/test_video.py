"""Averaging the views of a video."""

import math

import pytest
import torch

from saccade.tasks.video import average_views


@pytest.mark.shows("SF-65")
def test_average_views_is_the_log_of_the_mean_probability():
    logits = torch.tensor([[[0.0, math.log(3)], [math.log(9), 0.0]]])  # probabilities (1/4, 3/4) and (9/10, 1/10)
    expected = torch.tensor([[(0.25 + 0.9) / 2, (0.75 + 0.1) / 2]])
    torch.testing.assert_close(average_views(logits), expected.log())


def test_average_of_one_view_is_its_log_softmax():
    logits = torch.randn(3, 1, 7)
    torch.testing.assert_close(average_views(logits), logits[:, 0].log_softmax(-1))


def test_average_views_is_float32_and_finite_for_confident_views():
    logits = torch.tensor([[[200.0, -200.0], [-200.0, 200.0]]], dtype=torch.bfloat16)
    output = average_views(logits)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, torch.full((1, 2), 0.5).log())
