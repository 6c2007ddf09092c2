"""The pictures of a benchmark: accuracy against speed, and cost against pixels."""

from pathlib import Path
from typing import Any

from saccade._extras import require

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444", "#8C6D31")  # Okabe and Ito
MARKERS = "osD^vPX*"


def figure(width: float = 7.5, height: float = 4.6):
    require("matplotlib", "train").use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, height), dpi=150, layout="constrained")


def save(chart: Any, path: Path) -> Path:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    chart.savefig(temporary, format="png")
    temporary.replace(path)
    pyplot.close(chart)
    return path


def plain_numbers(axis: Any) -> None:
    """20 and 50 on a logarithmic axis, not powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(LogLocator(subs=(1.5, 3, 4, 7)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def plot_accuracy(rows: list[dict[str, Any]], accuracy: dict[str, float], title: str, path: Path) -> Path | None:
    """The papers' top-1 against the images a second measured here; None when no model has a printed accuracy."""
    known = [row for row in rows if row["model"] in accuracy]
    if not known:
        return None
    chart, axes = figure()
    for i, row in enumerate(known):
        x, y = row["images_per_second"], accuracy[row["model"]]
        axes.scatter(x, y, s=60, color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], zorder=3)
        axes.annotate(row["model"], (x, y), textcoords="offset points", fontsize=8, **beside(row, known, accuracy))
    axes.set(xlabel="images per second, measured", ylabel="ImageNet-1K top-1 in the paper, %", title=title)
    axes.set_xscale("log")
    plain_numbers(axes.xaxis)
    axes.margins(0.25, 0.15)
    axes.grid(alpha=0.3, which="both")
    return save(chart, path)


def beside(row: dict[str, Any], rows: list[dict[str, Any]], accuracy: dict[str, float]) -> dict[str, Any]:
    """Where a name stands: above its mark; on the inner side where another mark is right above it."""
    x, y = row["images_per_second"], accuracy[row["model"]]
    others = [(other["images_per_second"], accuracy[other["model"]]) for other in rows]
    if not any(0 < top - y < 0.8 and 0.8 < speed / x < 1.25 for speed, top in others):
        return dict(xytext=(0, 8), ha="center")
    slow = sum(speed < x for speed, _ in others) < len(others) / 2
    return dict(xytext=(8 if slow else -8, -3), ha="left" if slow else "right")


def plot_scaling(rows: list[dict[str, Any]], title: str, path: Path) -> Path:
    """Milliseconds and multiply-adds of one image against its pixels, both axes logarithmic."""
    require("matplotlib", "train").use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    chart, (left, right) = pyplot.subplots(1, 2, figsize=(10.5, 4.4), dpi=150, layout="constrained")
    for i, name in enumerate(dict.fromkeys(row["model"] for row in rows)):
        own = sorted((row for row in rows if row["model"] == name), key=lambda row: row["size"])
        style = dict(color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], label=name, markersize=5)
        sides = [row["size"] for row in own]
        left.plot(sides, [1e3 * row["seconds"] / row["batch"] for row in own], **style)
        right.plot(sides, [row["madds"] / 1e9 for row in own], **style)
    for axes, label in ((left, "milliseconds per image"), (right, "billions of multiply-adds")):
        axes.set(xscale="log", yscale="log", xlabel="side of the image, px", ylabel=label)
        sizes = sorted({row["size"] for row in rows})
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.xaxis.set_minor_locator(NullLocator())
        plain_numbers(axes.yaxis)
        axes.grid(alpha=0.3, which="both")
    left.legend(fontsize=8)
    chart.suptitle(title, fontsize=11)
    return save(chart, path)
