"""The statistics of a verdict: agreement with scipy, error rates, power."""

import math

import numpy as np
import pytest
from scipy import stats

from saccade.reproduce.verdict import (
    CONFIRMED,
    CONTRADICTED,
    NO_DIFFERENCE,
    UNDECIDED,
    UNMEASURED,
    combine,
    compare,
    confirmation_power,
    detectable,
)

TRIALS = 2000


def rate(sign: str, true: float, margin: float = 0.0, seeds: int = 3, pairs: int = 1, wanted: str = CONFIRMED) -> float:
    """Fraction of simulated claims with a verdict, at a true difference and spread 1; arms share a seed's effect."""
    rng = np.random.default_rng(0)
    count = 0
    for _ in range(TRIALS):
        effect = rng.normal(0, 3, seeds)  # of the seed on both arms, which pairing removes
        noise = rng.normal(0, math.sqrt(0.5), (2, seeds))
        left, right = effect + noise[0] + true, effect + noise[1]
        count += compare(left.tolist(), right.tolist(), sign, margin, pairs=pairs).verdict == wanted
    return count / TRIALS


def test_interval_is_that_of_the_paired_t_test():
    left, right = [41.2, 40.1, 42.3, 40.9], [39.9, 39.5, 40.2, 40.1]
    result = compare(left, right, ">")
    expected = stats.ttest_rel(left, right).confidence_interval(0.9)
    assert (result.low, result.high) == pytest.approx((expected.low, expected.high))
    assert result.mean == pytest.approx(1.2)
    assert result.spread == pytest.approx(np.std(np.subtract(left, right), ddof=1))
    one_sided = stats.ttest_rel(left, right, alternative="greater").pvalue
    assert (result.verdict == CONFIRMED) == (one_sided < 0.05)


@pytest.mark.parametrize(
    ("differences", "sign", "margin", "verdict"),
    [
        ([2.0, 2.2, 1.9], ">", 0, CONFIRMED),
        ([2.0, -1.5, 0.4], ">", 0, NO_DIFFERENCE),
        ([-2.0, -2.2, -1.9], ">", 0, CONTRADICTED),
        ([0.1, -0.2, 0.2], "=", 2, CONFIRMED),
        ([1.5, -1.4, 0.2], "=", 2, UNDECIDED),
        ([3.1, 3.0, 3.2], "=", 2, CONTRADICTED),
        ([-3.1, -3.0, -3.2], "=", 2, CONTRADICTED),
        ([-0.5, -0.6, -0.4], ">=", 2, CONFIRMED),
        ([9.0, 8.0, 9.5], ">=", 2, CONFIRMED),
        ([-3.1, -3.0, -3.2], ">=", 2, CONTRADICTED),
        ([-3.0, -0.5, -2.0], ">=", 2, UNDECIDED),
        ([1.0, 1.0, 1.0], ">", 0, CONFIRMED),  # no spread
        ([0.0, 0.0, 0.0], ">", 0, NO_DIFFERENCE),
    ],
)
def test_verdict_of_a_pair(differences, sign, margin, verdict):
    assert compare([50 + value for value in differences], [50.0] * 3, sign, margin).verdict == verdict


def test_false_confirmations_are_as_rare_as_stated():
    """On the bound of a claim, where it is just not true."""
    assert rate(">", 0.0) == pytest.approx(0.05, abs=0.015)
    assert rate(">=", -1.0, margin=1.0) == pytest.approx(0.05, abs=0.015)
    assert rate("=", 2.0, margin=2.0, seeds=5) == pytest.approx(0.05, abs=0.015)
    assert rate("=", -2.0, margin=2.0, seeds=5) == pytest.approx(0.05, abs=0.015)


def test_false_contradictions_are_divided_by_the_number_of_pairs():
    assert rate(">", 0.0, wanted=CONTRADICTED) == pytest.approx(0.05, abs=0.015)
    assert rate(">", 0.0, pairs=5, wanted=CONTRADICTED) == pytest.approx(0.01, abs=0.008)
    assert rate("=", 2.0, margin=2.0, wanted=CONTRADICTED) == pytest.approx(0.05, abs=0.015)


@pytest.mark.parametrize(("sign", "true", "margin", "seeds"), [(">", 1.5, 0, 3), (">=", 1.0, 1, 4), ("=", 0.5, 3, 5)])
def test_power_is_the_rate_of_confirmations(sign, true, margin, seeds):
    bounds = {">": (0, math.inf), ">=": (-margin, math.inf), "=": (-margin, margin)}[sign]
    assert rate(sign, true, margin, seeds) == pytest.approx(confirmation_power(true, 1.0, seeds, bounds), abs=0.03)


def test_detectable_difference_is_found_in_four_of_five_cases():
    assert rate(">", detectable(1.0, 3)) == pytest.approx(0.8, abs=0.03)
    assert detectable(1.0, 10) < detectable(1.0, 3)
    assert detectable(0.0, 3) == 0


def test_pairing_removes_the_effect_of_the_seed():
    left, right = [30.0, 40.0, 50.0], [29.0, 39.1, 49.1]
    assert compare(left, right, ">").verdict == CONFIRMED
    assert compare(left, right[1:] + right[:1], ">").verdict == NO_DIFFERENCE


def test_claim_needs_every_pair():
    assert combine([CONFIRMED, CONFIRMED]) == CONFIRMED
    assert combine([CONFIRMED, NO_DIFFERENCE]) == NO_DIFFERENCE
    assert combine([CONFIRMED, CONTRADICTED, NO_DIFFERENCE]) == CONTRADICTED
    assert combine([CONFIRMED, UNMEASURED]) == UNMEASURED
    assert combine([UNDECIDED, NO_DIFFERENCE]) == UNDECIDED
    assert combine([]) == UNMEASURED


def test_single_seed_is_refused():
    with pytest.raises(ValueError, match="at least 2 paired results, got 1 and 1"):
        compare([1.0], [2.0], ">")
