"""Token colours: distinguishable for colour-blind readers, consistent across stages."""

import numpy as np
import pytest
import torch

from saccade.explanation.drawing.colours import (
    BLUE_RED,
    TOKEN_COLOURS,
    colour_indices,
    colour_scale,
    parse_colours,
    same_tokens,
    token_colour,
    token_colours,
)
from saccade.tokens.trace import AssignmentTrace
from tests.explanation.planted import association, quadrants, region_trace

# Machado, Oliveira and Fernandes 2009, severity 1: linear RGB as perceived without one kind of cone.
VISION = {
    "none": np.eye(3),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
}


def oklab(colours: np.ndarray, vision: str) -> np.ndarray:
    """Colours in OKLab, where distance is perceived difference, after simulating a colour vision deficiency."""
    srgb = colours / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(linear @ VISION[vision].T, 0, 1)
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


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize(("count", "min_distance"), [(16, 0.07), (32, 0.055), (64, 0.035)])
def test_token_colours_differ_for_colour_blind_vision(vision, count, min_distance):
    lab = oklab(parse_colours(TOKEN_COLOURS)[:count], vision)
    distance = np.linalg.norm(lab[:, None] - lab[None], axis=2) + 9 * np.eye(count)
    assert distance.min() > min_distance


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.shows("VT-74")
def test_blue_red_scale_is_distinguishable(vision):
    low, middle, high = oklab(colour_scale(np.array([0.0, 0.5, 1.0]), BLUE_RED).astype(float), vision)
    assert min(np.linalg.norm(low - high), np.linalg.norm(low - middle), np.linalg.norm(middle - high)) > 0.15
    blue, red = colour_scale(np.array([0.0, 1.0]), BLUE_RED)
    assert blue[2] > blue[0] + 80
    assert red[0] > red[2] + 80


def test_token_colours_repeat_after_64_and_no_token_is_grey():
    assert len(np.unique(token_colours(64), axis=0)) == 64
    assert (token_colours(np.array([0, 64])) == token_colours(1)).all()
    assert token_colours(np.array([-1])).tolist() == [[128, 128, 128]]


def test_colour_indices_follow_overlap_into_a_new_stage():
    first = quadrants(8)._replace(name="stages.0.blocks.0")
    order = [2, 0, 3, 1]
    second = quadrants(4)
    second = second._replace(assignment=second.assignment[:, order], name="stages.1.blocks.0")
    assert [list(indices) for indices in colour_indices([first, second])] == [[0, 1, 2, 3], order]


def test_colour_indices_of_additional_tokens_are_unused_ones():
    first, second = quadrants(4), quadrants(4)
    more = torch.cat([second.assignment[:, [1]], torch.full((1, 2, 16), 1 / 16), second.assignment[:, [3]]], 1)
    second = AssignmentTrace(torch.cat([more, second.assignment[:, [0]]], 1), (4, 4), name="stages.1.blocks.0")
    indices = colour_indices([first._replace(name="stages.0.blocks.0"), second])[1]
    assert [indices[0], indices[3], indices[4]] == [1, 3, 0]
    assert sorted(indices) == [0, 1, 2, 3, 4]


def test_colour_indices_of_persisting_tokens_do_not_change():
    first = region_trace([(0.2, 0.2), (0.8, 0.8)])
    second = region_trace([(0.8, 0.8), (0.2, 0.2)])._replace(name="cortex.blocks.0")
    assert [list(indices) for indices in colour_indices([first, second])] == [[0, 1]] * 2
    blocks = [quadrants(4), quadrants(4)._replace(name="blocks.1")]
    blocks[1] = blocks[1]._replace(assignment=blocks[1].assignment.flip(1))
    assert [list(indices) for indices in colour_indices(blocks)] == [[0, 1, 2, 3]] * 2


def test_same_tokens_of_super_tokens_needs_the_same_grid():
    labels = torch.arange(8)[:, None] // 4 * 2 + torch.arange(8)[None] // 4
    first = association(labels, 4)
    assert same_tokens(first, first._replace(name="stages.1.blocks.0"))
    assert not same_tokens(first, first._replace(grid=(1, 4)))
    assert not same_tokens(quadrants(4), quadrants(4)._replace(name="other.0"))


def test_token_colour_is_a_row_of_token_colours():
    assert token_colour(0) == (0x00, 0x72, 0xB2)
    assert [token_colour(i) for i in range(64)] == [tuple(row) for row in token_colours(64).tolist()]
