"""Costs that the SparseFormer paper prints for its video models (Tables 5 and 6), at 32 frames of 224 px.

As for images, the printed costs leave out the two matrix products of the adaptive mixing.
"""

import pytest

from saccade.benchmark import count
from saccade.benchmark.paper import REPORTED
from tests.paper.precision import agrees, check_madds, check_params
from tests.paper.test_sparseformer_numbers import without_mixing

TINY, CLIP = "video_sparseformer_tiny", (3, 32, 224, 224)
SIZES = [  # Table 5: parameters, multiply-adds, recounted
    ("video_sparseformer_tiny", "31", "22", 22.2),
    ("video_sparseformer_small", "48", "38", 38.0),
    ("video_sparseformer_base", "81", "74", 73.6),
]
INFLATION = [(1, "7", 7.6), (4, "13", 13.5), (8, "22", 22.2)]  # Table 6


@pytest.mark.shows("SF-62")
@pytest.mark.parametrize(("name", "params", "madds", "recounted"), SIZES)
def test_variants_have_printed_costs(name, params, madds, recounted):
    cost = without_mixing(name, CLIP)
    check_params(cost.params, params)
    check_madds(cost.madds, madds)
    assert cost.madds / 1e9 == pytest.approx(recounted, rel=0.01)
    assert (REPORTED[name].params, REPORTED[name].madds) == (params, madds)


@pytest.mark.shows("SF-62")
@pytest.mark.parametrize(("inflation", "madds", "recounted"), INFLATION)
def test_inflations_have_printed_costs(inflation, madds, recounted):
    cost = without_mixing(TINY, CLIP, inflation=inflation)
    check_madds(cost.madds, madds)
    assert cost.madds / 1e9 == pytest.approx(recounted, rel=0.01)


@pytest.mark.shows("SF-62")
def test_inflation_of_16_costs_42_g_not_32():
    """Table 6 prints 32 G for inflation 16, after 7, 13 and 22 G; 42 is meant.

    With the mixing counted, as `saccade models` does, Tiny is 0.07 G above the tolerance of 22.
    """
    cost = without_mixing(TINY, CLIP, inflation=16)
    assert not agrees(cost.madds / 1e9, "32", 0.02)
    assert agrees(cost.madds / 1e9, "42", 0.02)
    assert count(TINY, CLIP).madds / 1e9 == pytest.approx(23.07, rel=0.001)


@pytest.mark.shows("SF-59")
def test_more_frames_cost_their_early_convolution_only():
    """Twice the frames cost twice the early convolution and nothing else."""
    one, two = (count(TINY, (3, frames, 224, 224)).madds for frames in (16, 32))
    assert two - one == 16 * 96 * 3 * 7**2 * 112**2
