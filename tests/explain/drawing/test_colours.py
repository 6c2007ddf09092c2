"""Colours that everybody can tell apart, and that mean the same token in every stage."""

import numpy as np
import pytest
import torch

from saccade.explain.drawing.colours import (
    BLUE_RED,
    TOKEN_COLOURS,
    anchors,
    colour_numbers,
    colour_scale,
    token_colours,
)
from saccade.tokens.trace import AssignmentTrace
from tests.explain.planted import looking_at, quadrants

# Machado, Oliveira and Fernandes 2009, severity 1: what linear RGB looks like without one kind of cone.
BLIND = {
    "none": np.eye(3),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
}


def oklab(colours: np.ndarray, eyes: str) -> np.ndarray:
    """Where colours lie in a space in which distance is difference to the eye."""
    share = colours / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    linear = np.clip(linear @ BLIND[eyes].T, 0, 1)
    cones = np.cbrt(
        linear
        @ np.array(
            [
                [0.4122214708, 0.2119034982, 0.0883024619],
                [0.5363325363, 0.6806995451, 0.2817188376],
                [0.0514459929, 0.1073969566, 0.6299787005],
            ]
        )
    )
    return cones @ np.array(
        [
            [0.2104542553, 1.9779984951, 0.0259040371],
            [0.793617785, -2.428592205, 0.7827717662],
            [-0.0040720468, 0.4505937099, -0.808675766],
        ]
    )


@pytest.mark.parametrize("eyes", BLIND)
@pytest.mark.parametrize(("count", "least"), [(16, 0.07), (32, 0.055), (64, 0.035)])
def test_token_colours_differ_for_colour_blind_eyes(eyes, count, least):
    lab = oklab(anchors(TOKEN_COLOURS)[:count], eyes)
    distance = np.linalg.norm(lab[:, None] - lab[None], axis=2) + 9 * np.eye(count)
    assert distance.min() > least


@pytest.mark.parametrize("eyes", BLIND)
def test_blue_is_low_and_red_is_high_for_everybody(eyes):
    low, middle, high = oklab(colour_scale(np.array([0.0, 0.5, 1.0]), BLUE_RED).astype(float), eyes)
    assert min(np.linalg.norm(low - high), np.linalg.norm(low - middle), np.linalg.norm(middle - high)) > 0.15
    blue, red = colour_scale(np.array([0.0, 1.0]), BLUE_RED)
    assert blue[2] > blue[0] + 80
    assert red[0] > red[2] + 80


def test_colours_repeat_and_nobody_is_grey():
    assert len(np.unique(token_colours(64), axis=0)) == 64
    assert (token_colours(np.array([0, 64])) == token_colours(1)).all()
    assert token_colours(np.array([-1])).tolist() == [[128, 128, 128]]


def test_a_new_stage_takes_the_colours_of_the_tokens_it_overlaps():
    first = quadrants(8)._replace(name="stages.0.blocks.0")
    order = [2, 0, 3, 1]
    second = quadrants(4)
    second = second._replace(assignment=second.assignment[:, order], name="stages.1.blocks.0")
    assert [list(numbers) for numbers in colour_numbers([first, second])] == [[0, 1, 2, 3], order]


def test_more_tokens_than_before_take_free_colours():
    first, second = quadrants(4), quadrants(4)
    more = torch.cat([second.assignment[:, [1]], torch.full((1, 2, 16), 1 / 16), second.assignment[:, [3]]], 1)
    second = AssignmentTrace(torch.cat([more, second.assignment[:, [0]]], 1), (4, 4), name="stages.1.blocks.0")
    numbers = colour_numbers([first._replace(name="stages.0.blocks.0"), second])[1]
    assert [numbers[0], numbers[3], numbers[4]] == [1, 3, 0]
    assert sorted(numbers)[:4] == [0, 1, 2, 3]
    assert len(set(numbers)) == 5


def test_tokens_that_live_on_keep_their_colour():
    here, there = looking_at([(0.2, 0.2), (0.8, 0.8)]), looking_at([(0.8, 0.8), (0.2, 0.2)])
    assert [list(numbers) for numbers in colour_numbers([here, there._replace(name="cortex.blocks.0")])] == [[0, 1]] * 2
    blocks = [quadrants(4), quadrants(4)._replace(name="blocks.1")]
    blocks[1] = blocks[1]._replace(assignment=blocks[1].assignment.flip(1))
    assert [list(numbers) for numbers in colour_numbers(blocks)] == [[0, 1, 2, 3]] * 2
