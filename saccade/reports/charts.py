"""Charts by matplotlib: inline SVG in the colours of the stylesheet, light or dark, or PNG."""

import io
import math
import re
from collections.abc import Sequence
from typing import Any

from saccade._extras import require
from saccade.reports.page import part

INK, SOFT, GRID = "#1a2028", "#5b6472", "#e3e7ec"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#444444", "#8c6d31")  # Okabe and Ito
VARIABLES = {INK: "--ink", SOFT: "--soft", GRID: "--line"} | {c: f"--line-{i}" for i, c in enumerate(COLOURS)}
MARKERS = "osD^vPX*"
MAX_CONFUSIONS = 12  # rows in the table of confusions
MAX_MATRIX_CLASSES = 60  # classes up to which the confusion matrix is drawn
Series = tuple[str, Sequence[float], Sequence[float]]  # name, x, y


def style() -> Any:
    """Return the context manager in which charts are drawn and written."""
    keys = ["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"]
    return require("matplotlib", "train").rc_context(
        dict.fromkeys(keys, INK)
        | {
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.titlesize": 10,
            "grid.color": GRID,
            "legend.frameon": False,
            "legend.fontsize": 8,
            "font.size": 9,
            "font.family": "sans-serif",
            "svg.fonttype": "none",
            "svg.hashsalt": "saccade",  # deterministic element ids
        }
    )


def new_chart(count: int = 1, columns: int = 3, width: float = 4.4, height: float = 2.5) -> tuple[Any, list[Any]]:
    """Return a figure and its `count` axes, of `width` x `height` inches each."""
    require("matplotlib", "train")
    from matplotlib.figure import Figure

    columns = min(count, columns)
    rows = -(-count // columns)
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(count)]


def to_svg(figure: Any) -> Any:
    """Return a figure as SVG markup whose colours are variables of the stylesheet."""
    from markupsafe import Markup

    text = _write(figure, "svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = text.decode()
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text[text.index("<svg") :])  # inside HTML
    used = set(re.findall(r"#([\w-]+)", text))  # a page has several charts, and an id only once
    text = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return Markup(text)


def to_png(figure: Any) -> bytes:
    """Return a figure as a PNG file."""
    return _write(figure, "png", dpi=160, metadata={"Software": None})


def to_image(figure: Any, format: str) -> bytes:
    """Return a figure as a file of one of matplotlib's formats."""
    return to_png(figure) if format == "png" else _write(figure, format, dpi=160)


def _write(figure: Any, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    with style():
        figure.savefig(buffer, format=kind, **options)
    return buffer.getvalue()


def line_chart(title: str, series: Sequence[Series], x_label: str) -> Any:
    """Return lines as SVG, or nothing without points; values that are not finite are left out."""
    series = [entry for entry in series if len(entry[1])]
    if not series:
        return ""
    with style():
        figure, (ax,) = new_chart()
        for colour, (name, xs, ys) in zip(COLOURS, series, strict=False):
            points = thin([(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)])
            marker = "o" if len(points) <= 60 else ""
            ax.plot(*zip(*points, strict=True), color=colour, label=name, marker=marker, markersize=3, linewidth=1.6)
        ax.set_title(title, loc="left", fontweight="bold")
        ax.set_xlabel(x_label)
        if len(series) > 1:
            ax.legend()
        return to_svg(figure)


def thin(points: list[Any], limit: int = 400) -> list[Any]:
    """Return every n-th point and the last one, about `limit` in all."""
    step = -(-len(points) // limit) or 1
    return points[::step] + (points[-1:] if (len(points) - 1) % step else [])


def classes_section(values: Sequence[float | None], confusion: list[list[int]], names: list[str], metric: str) -> Any:
    """Return bars of a metric per class (percent) and the confusion matrix, which counts (true, predicted) pairs."""
    measured = [(name, value) for name, value in zip(names, values, strict=True) if value is not None]
    bars = [(name, value / 100, f"{value:.1f}") for name, value in sorted(measured, key=lambda entry: entry[1])]
    drawn = matrix_chart(confusion, names) if confusion and len(names) <= MAX_MATRIX_CLASSES else ""
    return part("classes", metric, bars, drawn, most_confused(confusion, names))


def most_confused(matrix: list[list[int]], names: list[str]) -> list[tuple[str, str, int]]:
    """Return the most frequent pairs of true and predicted class with their count."""
    counts = [(times, i, j) for i, row in enumerate(matrix) for j, times in enumerate(row) if i != j and times]
    return [(names[i], names[j], times) for times, i, j in sorted(counts, reverse=True)[:MAX_CONFUSIONS]]


def matrix_chart(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> Any:
    """Return a confusion matrix as SVG, rows as percentages of their class; for up to about 60 classes."""
    count = len(names)
    diagonal, other = _rgb(COLOURS[0]), _rgb(COLOURS[1])
    rows = [[value / max(1, sum(row)) for value in row] for row in matrix]
    cells = [[(*(diagonal if i == j else other), rows[i][j]) for j in range(count)] for i in range(count)]
    with style():
        figure, (ax,) = new_chart(width=4.6, height=4.2)
        ax.imshow(cells, interpolation="nearest")
        ax.grid(False)
        size = max(4, min(9, 180 / count))
        labels = [name if len(name) <= 15 else f"{name[:14]}…" for name in names]
        ax.set_xticks(range(count), labels, rotation=60, ha="right", rotation_mode="anchor", fontsize=size)
        ax.set_yticks(range(count), labels, fontsize=size)
        if count <= 20:
            for i, row in enumerate(rows):
                for j, value in enumerate(row):
                    if value >= 0.005:
                        ax.text(j, i, f"{100 * value:.0f}", ha="center", va="center", fontsize=size)
        return to_svg(figure)


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
