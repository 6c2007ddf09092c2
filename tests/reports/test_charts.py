"""SVG charts."""

import re

import pytest

from saccade.reports.charts import line_chart, matrix_chart, nice_range


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.0, 10.0, (0, 10, [0, 2, 4, 6, 8, 10])), (0.13, 0.87, (0.1, 0.9, [0.1 * i for i in range(1, 10)]))],
)
def test_nice_range(low, high, expected):
    first, last, ticks = nice_range(low, high)
    assert (first, last) == pytest.approx(expected[:2])
    assert ticks == pytest.approx(expected[2])


def test_nice_range_of_constant_contains_it():
    low, high, _ = nice_range(3.0, 3.0)
    assert low < 3.0 < high


def test_non_finite_points_are_left_out():
    """Each tooltip belongs to its own point."""
    chart = line_chart("Loss", [("training", [1, 2, 3], [1.0, float("nan"), 3.0])], "epoch")
    assert re.findall("<title>(.*?)</title>", chart) == ["training 1 at 1", "training 3 at 3"]
    assert line_chart("Loss", [("training", [], [])], "epoch") == ""


def test_matrix_rows_are_fractions_of_their_class():
    chart = matrix_chart([[3, 1], [0, 2]], ["a", "b"])
    assert re.findall("<title>(.*?)</title>", chart) == [
        "a predicted as a: 3 (75.0 %)", "a predicted as b: 1 (25.0 %)", "b predicted as b: 2 (100.0 %)"
    ]  # fmt: skip
