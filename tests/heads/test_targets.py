"""Validation of detection targets."""

import pytest
import torch

from saccade.heads.targets import check_targets
from tests.heads.small_detectors import SMALL, make_target

EMPTY = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0).long()}


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (None, r"expected one target per image \(1\), got none\. For inference, call \.eval\(\)"),
        ([], r"expected one target per image \(1\), got 0"),
        ([{"boxes": torch.zeros(0, 4)}], r"target 0 has no labels, masks\.$"),
        ([EMPTY], r"target 0 has no masks\. To train without masks, build the detector with masks=False\."),
        ([make_target([[0, 0, 9, 9]], [4], SMALL)], r"expected labels from 1 to 3 \(0 is the background\), got 4 to 4"),
        ([make_target([[0, 0, 9, 9]], [0], SMALL)], "got 0 to 0"),
        (
            [{"boxes": torch.zeros(4), "labels": torch.zeros(1).long(), "masks": torch.zeros(1, *SMALL)}],
            r"target 0: expected boxes \(n, 4\) and labels \(n,\), got \(4,\) and \(1,\)",
        ),
        (
            [{"boxes": torch.zeros(2, 4), "labels": torch.ones(1).long(), "masks": torch.zeros(2, *SMALL)}],
            r"got \(2, 4\) and \(1,\)",
        ),
    ],
)
def test_check_targets_names_the_problem(targets, message):
    with pytest.raises(ValueError, match=message):
        check_targets(targets, 1, 3, masks=True)


def test_check_targets_accepts_valid_and_empty_targets():
    check_targets([make_target([[0, 0, 9, 9]], [3], SMALL)], 1, 3, masks=True)
    check_targets([EMPTY], 1, 3, masks=False)
