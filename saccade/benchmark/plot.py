"""Plot benchmark results: accuracy against throughput, and cost against image size."""

from pathlib import Path
from typing import Any

from saccade._extras import require

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444", "#8C6D31")  # Okabe and Ito
MARKERS = "osD^vPX*"


def new_figure(width: float = 7.5, height: float = 4.6) -> tuple[Any, Any]:
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
    """Label a logarithmic axis with plain numbers instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(LogLocator(subs=(1.5, 3, 4, 7)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def plot_accuracy(rows: list[dict[str, Any]], accuracy: dict[str, float], title: str, path: Path) -> Path | None:
    """Plot published top-1 against measured images per second; None if no model has a published accuracy."""
    published = [row for row in rows if row["model"] in accuracy]
    if not published:
        return None
    chart, axes = new_figure()
    for i, row in enumerate(published):
        x, y = row["images_per_second"], accuracy[row["model"]]
        axes.scatter(x, y, s=60, color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], zorder=3)
        axes.annotate(
            row["model"], (x, y), textcoords="offset points", fontsize=8, **label_position(row, published, accuracy)
        )
    axes.set(xlabel="images per second, measured", ylabel="ImageNet-1K top-1 in the paper, %", title=title)
    axes.set_xscale("log")
    plain_numbers(axes.xaxis)
    axes.margins(0.25, 0.15)
    axes.grid(alpha=0.3, which="both")
    return save(chart, path)


def label_position(row: dict[str, Any], rows: list[dict[str, Any]], accuracy: dict[str, float]) -> dict[str, Any]:
    """Place a label above its marker, or to the side of it if another marker is directly above."""
    x, y = row["images_per_second"], accuracy[row["model"]]
    points = [(other["images_per_second"], accuracy[other["model"]]) for other in rows]
    if not any(0 < top - y < 0.8 and 0.8 < speed / x < 1.25 for speed, top in points):
        return dict(xytext=(0, 8), ha="center")
    slow = sum(speed < x for speed, _ in points) < len(points) / 2
    return dict(xytext=(8 if slow else -8, -3), ha="left" if slow else "right")


def plot_scaling(rows: list[dict[str, Any]], title: str, path: Path) -> Path:
    """Plot milliseconds and multiply-adds per image against image size on logarithmic axes."""
    require("matplotlib", "train").use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    chart, (left, right) = pyplot.subplots(1, 2, figsize=(10.5, 4.4), dpi=150, layout="constrained")
    for i, name in enumerate(dict.fromkeys(row["model"] for row in rows)):
        model_rows = sorted((row for row in rows if row["model"] == name), key=lambda row: row["size"])
        style = dict(color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], label=name, markersize=5)
        sides = [row["size"] for row in model_rows]
        left.plot(sides, [1e3 * row["seconds"] / row["batch"] for row in model_rows], **style)
        right.plot(sides, [row["madds"] / 1e9 for row in model_rows], **style)
    for axes, label in ((left, "milliseconds per image"), (right, "billions of multiply-adds")):
        axes.set(xscale="log", yscale="log", xlabel="image size, px", ylabel=label)
        sizes = sorted({row["size"] for row in rows})
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.xaxis.set_minor_locator(NullLocator())
        plain_numbers(axes.yaxis)
        axes.grid(alpha=0.3, which="both")
    left.legend(fontsize=8)
    chart.suptitle(title, fontsize=11)
    return save(chart, path)
