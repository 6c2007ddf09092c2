"""Boxes: adjustment against SparseFormer Eqs. 7-8, and for any values."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.layers.boxes import adjust, centre_and_size, from_centre

deltas = st.lists(st.floats(-1e4, 1e4, width=32), min_size=4, max_size=4)
corner = st.floats(-1, 1, width=32)
side = st.floats(2**-6, 2, width=32)


@pytest.mark.shows("SF-19")
def test_adjust_matches_eqs_7_and_8():
    box = torch.tensor([0.2, 0.1, 0.6, 0.3], dtype=torch.float64)  # centre 0.4, 0.2, size 0.4, 0.2
    moved = adjust(box, torch.tensor([0.5, -1.0, math.log(2), math.log(0.5)], dtype=torch.float64))
    # centre 0.4 + 0.5 * 0.4, 0.2 - 1 * 0.2; size 0.8, 0.1
    torch.testing.assert_close(moved, torch.tensor([0.2, -0.05, 1.0, 0.05], dtype=torch.float64))


@pytest.mark.shows("SF-58")
def test_adjust_treats_a_tube_as_a_box_with_three_axes():
    flat = torch.tensor([0.2, 0.1, 0.6, 0.3])
    tube = torch.tensor([0.2, 0.1, 0.0, 0.6, 0.3, 1.0])
    moved = adjust(tube, torch.tensor([0.5, -1.0, 0.25, 0.1, -0.2, 0.0]))
    torch.testing.assert_close(moved[[0, 1, 3, 4]], adjust(flat, torch.tensor([0.5, -1.0, 0.1, -0.2])))
    torch.testing.assert_close(moved[[2, 5]], torch.tensor([0.25, 1.25]))


@pytest.mark.shows("SF-01")
@given(x=corner, y=corner, width=side, height=side)
@settings(max_examples=50, deadline=None)
def test_from_centre_inverts_centre_and_size(x, y, width, height):
    box = torch.tensor([x, y, x + width, y + height], dtype=torch.float64)
    torch.testing.assert_close(from_centre(*centre_and_size(box)), box)


@pytest.mark.shows("SF-21")
@given(x=corner, y=corner, width=side, height=side, deltas=deltas)
@settings(max_examples=100, deadline=None)
def test_adjust_keeps_sides_positive_and_finite(x, y, width, height, deltas):
    """In float32; the gradient is finite, too."""
    box = torch.tensor([x, y, x + width, y + height])
    deltas = torch.tensor(deltas)
    deltas[:2] = deltas[:2].clamp(-4, 4)  # a far shift loses the digits of a small size
    deltas.requires_grad_()
    moved = adjust(box, deltas)
    assert moved.isfinite().all()
    assert (centre_and_size(moved)[1] > 0).all()
    assert torch.autograd.grad(moved.sum(), deltas)[0].isfinite().all()


@given(deltas=deltas)
@settings(max_examples=50, deadline=None)
def test_repeated_adjust_stays_finite(deltas):
    box = torch.tensor([0.25, 0.25, 0.75, 0.75])
    for _ in range(5):
        box = adjust(box, torch.tensor(deltas))
    assert box.isfinite().all()


@pytest.mark.shows("SF-19")
def test_adjust_of_a_flipped_box_uses_the_absolute_size():
    """Training can swap the ends of a learned region; the authors' code shifts and grows it by its absolute size."""
    box = torch.tensor([0.6, 0.1, 0.2, 0.3], dtype=torch.float64, requires_grad=True)  # x0 > x1
    deltas = torch.tensor([0.5, -1.0, math.log(2), math.log(0.5)], dtype=torch.float64)
    moved = adjust(box, deltas)
    torch.testing.assert_close(moved, torch.tensor([0.2, -0.05, 1.0, 0.05], dtype=torch.float64))
    gradient = torch.autograd.grad(moved[0], box)[0]  # x0' = (x0 + x1) / 2 + (0.5 - 2 / 2) (x0 - x1)
    torch.testing.assert_close(gradient, torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float64))
