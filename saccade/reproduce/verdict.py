"""The test of a claim: a confidence interval of paired differences against what the claim allows.

For two arms, d is the difference of their metrics with the same seed (the same data order and augmentation), n the
number of seeds. The interval mean(d) -+ t(1 - alpha, n - 1) * sd(d) / sqrt(n) has one-sided error `ALPHA` at each end.
A claim allows the true differences

    A > B     d > 0
    A >= B    d > -margin               (non-inferiority)
    A = B     -margin < d < margin      (equivalence: two one-sided tests)

and a pair is confirmed if the interval lies inside, contradicted if it lies outside, else undecided. A claim of several
pairs is confirmed if every pair is (an intersection-union test: its error stays below `ALPHA`), and contradicted if any
pair is, with the error divided by the number of pairs (Bonferroni).
"""

import math
import statistics
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from saccade._extras import require

ALPHA = 0.05
POWER = 0.8  # at which the detectable difference is reported
CONFIRMED, CONTRADICTED = "confirmed", "contradicted"
NO_DIFFERENCE = "no difference at this scale"  # of A > B: neither order is shown
UNDECIDED = "not decided at this scale"  # of A = B and A >= B: neither the claim nor its opposite is shown
UNMEASURED = "not measured"


class Comparison(NamedTuple):
    """Paired differences of two arms, and what they show."""

    differences: list[float]
    mean: float
    spread: float  # standard deviation of the differences
    low: float  # of the confidence interval
    high: float
    verdict: str
    detectable: float  # true difference from the bound of the claim that is confirmed with probability `POWER`
    power: float | None  # probability to confirm the claim if the paper's difference is the true one


def allowed(sign: str, margin: float) -> tuple[float, float]:
    """The true differences that a claim allows, as an open interval."""
    return {">": (0.0, math.inf), ">=": (-margin, math.inf), "=": (-margin, margin)}[sign]


def compare(
    left: Sequence[float],
    right: Sequence[float],
    sign: str,
    margin: float = 0.0,
    printed: float | None = None,
    pairs: int = 1,
) -> Comparison:
    """Compare the metrics of two arms, seed by seed.

    Args:
        sign, margin: the claim, see `allowed`.
        printed: the difference in the paper, for the power.
        pairs: number of pairs of the claim, for the error of a contradiction.
    """
    if len(left) != len(right) or len(left) < 2:
        raise ValueError(f"expected at least 2 paired results, got {len(left)} and {len(right)}. Run more seeds.")
    differences = [a - b for a, b in zip(left, right, strict=True)]
    count, mean, spread = len(differences), statistics.fmean(differences), statistics.stdev(differences)
    bounds = allowed(sign, margin)
    low, high = interval(mean, spread, count, ALPHA)
    outer_low, outer_high = interval(mean, spread, count, ALPHA / pairs)
    if bounds[0] < low and high < bounds[1]:
        verdict = CONFIRMED
    elif outer_high < bounds[0] or outer_low > bounds[1]:
        verdict = CONTRADICTED
    else:
        verdict = NO_DIFFERENCE if sign == ">" else UNDECIDED
    power = None if printed is None else confirmation_power(printed, spread, count, bounds)
    return Comparison(differences, mean, spread, low, high, verdict, detectable(spread, count), power)


def interval(mean: float, spread: float, count: int, alpha: float) -> tuple[float, float]:
    """The confidence interval of a mean difference, with one-sided error `alpha` at each end."""
    width = critical(count, alpha) * spread / math.sqrt(count)
    return mean - width, mean + width


@cache
def critical(count: int, alpha: float) -> float:
    """The quantile of Student's t."""
    return float(require("scipy.stats", "train").t.ppf(1 - alpha, count - 1))


def confirmation_power(true: float, spread: float, count: int, bounds: tuple[float, float]) -> float:
    """Probability that the interval lies within `bounds` at a true difference, with the measured spread.

    Exact for one bound (noncentral t); for two, the probabilities to miss either bound are added.
    """
    missed = sum(1 - _one_sided(distance, spread, count) for distance in (true - bounds[0], bounds[1] - true))
    return max(0.0, 1 - missed)


def _one_sided(distance: float, spread: float, count: int) -> float:
    """Probability that a one-sided t test shows a true difference `distance` from its bound."""
    if math.isinf(distance) or spread == 0:
        return 1.0 if distance > 0 else 0.0
    shift = distance / (spread / math.sqrt(count))
    return float(require("scipy.stats", "train").nct.sf(critical(count, ALPHA), count - 1, shift))


def detectable(spread: float, count: int) -> float:
    """The true difference that a one-sided test shows with probability `POWER`, with the measured spread."""
    return spread * _unit_detectable(count)


@cache
def _unit_detectable(count: int) -> float:
    """The detectable difference at a spread of 1."""
    optimize = require("scipy.optimize", "train")
    return float(optimize.brentq(lambda distance: _one_sided(distance, 1.0, count) - POWER, 0.0, 100.0))


def combine(verdicts: Sequence[str]) -> str:
    """The verdict of a claim from those of its pairs."""
    for verdict in (CONTRADICTED, UNMEASURED, UNDECIDED, NO_DIFFERENCE):
        if verdict in verdicts:
            return verdict
    return CONFIRMED if verdicts else UNMEASURED
