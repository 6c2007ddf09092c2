"""Charts by matplotlib."""

import io
import re

import numpy as np
from PIL import Image

from saccade.reports.charts import COLOURS, line_chart, matrix_chart, new_chart, style, to_png, to_svg


def test_lines_have_the_colours_of_the_stylesheet():
    chart = line_chart("Loss", [("training", [1, 2], [1.0, 3.0]), ("validation", [1, 2], [2.0, 2.5])], "epoch")
    assert {"var(--line-0)", "var(--line-1)", "var(--ink)"} <= set(re.findall(r"var\([\w-]+\)", chart))
    assert not re.search(r"#(?!000000|ffffff)[0-9a-f]{6}\b", chart)
    assert "validation" in chart
    assert line_chart("Loss", [("training", [], [])], "epoch") == ""


def test_non_finite_points_are_left_out():
    chart = line_chart("Loss", [("training", [1, 2, 3], [1.0, float("nan"), 3.0])], "epoch")
    assert chart == line_chart("Loss", [("training", [1, 3], [1.0, 3.0])], "epoch")


def test_ids_of_charts_are_referenced():
    """Several charts share a page: ids that nothing refers to are removed."""
    chart = line_chart("Loss", [("training", [1, 2], [1.0, 3.0])], "epoch")
    ids = re.findall(r'\bid="([^"]*)"', chart)
    assert ids
    assert all(f"#{name}" in chart for name in ids)


def test_matrix_rows_are_percentages_of_their_class():
    chart = matrix_chart([[3, 1], [0, 2]], ["<a>", "b"])
    assert re.findall(r">(\d+)</text>", chart) == ["75", "25", "100"]
    assert "&lt;a&gt;" in chart


def test_png_has_the_same_colours():
    with style():
        figure, (ax,) = new_chart()
        ax.bar([0], [1], color=COLOURS[0])
    pixels = np.array(Image.open(io.BytesIO(to_png(figure))).convert("RGB"))
    assert (pixels == (0x00, 0x72, 0xB2)).all(-1).mean() > 0.3
    assert "var(--line-0)" in to_svg(figure)
