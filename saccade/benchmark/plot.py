"""Plot accuracy against cost and throughput, and cost against image size."""

from typing import Any

from saccade.benchmark.paper import COMPARED, REPORTED
from saccade.reports.charts import COLOURS, MARKERS, new_chart, style


def published_accuracy(row: dict[str, Any]) -> float | None:
    """Return the published ImageNet-1K top-1 of a measured model; None for another image size or model options."""
    reported = REPORTED.get(row["model"])
    size = reported.size if reported else 224
    if row["size"] != size or set(row.get("options", ())) - {"img_size"} or row["model"].startswith("video_"):
        return None
    return reported.top1 if reported else COMPARED.get(row["model"])


def plot_accuracy(rows: list[dict[str, Any]], title: str) -> Any:
    """Plot published top-1 against measured images per second; None if no row has a published accuracy."""
    points = [(row["model"], row["images_per_second"], published_accuracy(row)) for row in rows]
    published = [(name, x, y) for name, x, y in points if y is not None]
    if not published:
        return None
    with style():
        figure, (axes,) = new_chart(width=7.5, height=4.6)
        for i, (_, x, y) in enumerate(published):
            axes.scatter(x, y, s=60, color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], zorder=3)
        axes.set(xlabel="images per second, measured", ylabel="ImageNet-1K top-1 in the paper, %", title=title)
        axes.set_xscale("log")
        plain_numbers(axes.xaxis)
        axes.margins(0.25, 0.15)
        boxes: list[Any] = []
        for name, x, y in published:
            place_label(axes, name, (x, y), True, boxes)
    return figure


def plot_scaling(rows: list[dict[str, Any]], title: str) -> Any:
    """Plot milliseconds and multiply-adds per image against image size on logarithmic axes."""
    with style():
        from matplotlib.ticker import NullLocator

        figure, (left, right) = new_chart(2, width=5.2, height=4.4)
        for i, name in enumerate(dict.fromkeys(row["model"] for row in rows)):
            model_rows = sorted((row for row in rows if row["model"] == name), key=lambda row: row["size"])
            line = dict(color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], label=name, markersize=5)
            sides = [row["size"] for row in model_rows]
            left.plot(sides, [1e3 * row["seconds"] / row["batch"] for row in model_rows], **line)
            right.plot(sides, [row["madds"] / 1e9 for row in model_rows], **line)
        for axes, label in ((left, "milliseconds per image"), (right, "billions of multiply-adds")):
            axes.set(xscale="log", yscale="log", xlabel="image size, px", ylabel=label)
            sizes = sorted({row["size"] for row in rows})
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.xaxis.set_minor_locator(NullLocator())
            plain_numbers(axes.yaxis)
        left.legend()
        figure.suptitle(title, fontsize=11)
    return figure


def plain_numbers(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(LogLocator(subs=(1.5, 3, 4, 7)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


TRADE_OFFS = {  # key of a row -> axis label, whether less is better
    "params": ("million parameters", True),
    "madds": ("billion multiply-adds", True),
    "images_per_second": ("images per second, one V100", False),
}


LABEL_OFFSETS = (  # in points, and the side of the text that is there
    (6, 4, "left"), (6, -5, "left"), (-6, 4, "right"), (-6, -5, "right"),
    (0, 11, "center"), (0, -11, "center"), (10, 14, "left"), (10, -15, "left"),
)  # fmt: skip


def pareto_front(points: list[tuple[float, float]], less_is_better: bool = True) -> list[tuple[float, float]]:
    """The (cost, accuracy) that no other point beats in both, sorted by cost."""
    sign = 1 if less_is_better else -1
    front: list[tuple[float, float]] = []
    for cost, accuracy in sorted(set(points), key=lambda point: (sign * point[0], -point[1])):
        if not front or accuracy > front[-1][1]:
            front.append((cost, accuracy))
    return sorted(front)


def place_label(axes: Any, text: str, point: tuple[float, float], own: bool, boxes: list[Any]) -> None:
    """Write a name beside its point, at the first of eight positions that covers none of `boxes`, the names so far.

    Without such a position an own model is written above its point, another one not at all.
    """
    font = dict(fontsize=7.5, color="black") if own else dict(fontsize=6.5, color="#777777")
    for x, y, align in LABEL_OFFSETS:
        label = axes.annotate(text, point, textcoords="offset points", xytext=(x, y), ha=align, va="center", **font)
        box = label.get_window_extent()
        if not any(box.overlaps(other) for other in boxes):
            boxes.append(box)
            return
        label.remove()
    if own:
        axes.annotate(text, point, textcoords="offset points", xytext=(0, 6), ha="center", **font)


def plot_trade_offs(rows: list[dict[str, Any]], families: list[str]) -> Any:
    """Plot top-1 against parameters, multiply-adds and images per second, with the Pareto front of all rows.

    rows: as in `saccade.benchmark.paper.comparison_rows`. Models of `families` are coloured and named; other models are
    grey, and named where they are on the front.
    """
    with style():
        figure, panels = new_chart(3, width=5.7, height=6)
        for axes, (key, (label, less)) in zip(panels, TRADE_OFFS.items(), strict=True):
            complete = [row for row in rows if row.get(key) and row["top1"]]
            front = pareto_front([(row[key], row["top1"]) for row in complete], less)
            where = "post" if less else "pre"
            axes.step(*zip(*front, strict=True), where=where, color="#999999", lw=1.2, label="Pareto front")
            for row in complete:
                point, own = (row[key], row["top1"]), row["family"] in families
                colour = COLOURS[families.index(row["family"])] if own else "#bbbbbb"
                marker = "o" if row["size"] <= 300 else "D"
                axes.scatter(*point, s=46 if own else 16, color=colour, marker=marker, zorder=3)
            for i, family in enumerate(families):
                axes.scatter([], [], s=46, color=COLOURS[i], label=family)
            axes.set(xscale="log", xlabel=label)
            plain_numbers(axes.xaxis)
            axes.margins(0.12, 0.05)
            boxes: list[Any] = []
            for row in sorted(complete, key=lambda row: row["family"] not in families):  # own models first
                point, own = (row[key], row["top1"]), row["family"] in families
                if own or point in front:
                    text = row["model"].removesuffix(" (ours)") + ("" if row["size"] == 224 else f" {row['size']}")
                    place_label(axes, text, point, own, boxes)
        panels[0].set_ylabel("ImageNet-1K top-1 as printed, %")
        panels[0].legend(loc="lower right")
    return figure
