"""Scores as a chart and as one HTML page."""

from typing import TYPE_CHECKING, Any

from saccade.reports.charts import COLOURS, new_chart, style, to_svg
from saccade.reports.page import render

if TYPE_CHECKING:
    from saccade.explanation.scores.score import Scores

METHODS = {"tokens": COLOURS[0], "SLIC": COLOURS[4], "average pooling": "#8c96a3", "random": "#8c96a3"}
TITLES = {
    "accuracy": "achievable accuracy\n(higher is better)",
    "recall": "boundary recall\n(higher is better)",
    "undersegmentation": "under-segmentation error\n(lower is better)",
    "compactness": "compactness\n(1: discs)",
}


def chart(scores: "Scores") -> Any:
    """Bars of the superpixel metrics and the two curves, or bars of the redundancy without them."""
    names = [name for name in TITLES if scores.superpixels]
    kinds = [name for name in ("deletion", "insertion") if f"{name}, tokens" in scores.curves]
    with style():
        figure, axes = new_chart(len(names) + len(kinds) or 1, width=3.1, height=2.9)
        for name, ax in zip(names, axes, strict=False):
            _bars(ax, scores.superpixels, name)
        for name, ax in zip(kinds, axes[len(names) :], strict=False):
            _curves(ax, scores.curves, name)
        if names:
            handles, methods = axes[0].get_legend_handles_labels()
            figure.legend(handles, methods, loc="outside upper left", ncols=3, fontsize=9)
        if not names and not kinds:
            _redundancy_bars(axes[0], scores.maps)
    return figure


def _bars(ax: Any, rows: list[dict[str, Any]], name: str) -> None:
    steps = list(dict.fromkeys(row["step"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for i, method in enumerate(methods):
        values = [next(row[name] for row in rows if row["step"] == step and row["method"] == method) for step in steps]
        positions = [k + (i - (len(methods) - 1) / 2) * 0.27 for k in range(len(steps))]
        ax.bar(positions, values, width=0.25, color=METHODS[method], label=method)
    ax.set_title(TITLES[name])
    ax.set_xticks(range(len(steps)), [step.replace(", ", "\n") for step in steps], fontsize=8)


def _curves(ax: Any, curves: dict[str, Any], name: str) -> None:
    for method in ("tokens", "random"):
        curve = curves[f"{name}, {method}"]
        label = f"{method}, area {curve['area']:.3f}"
        ax.plot(curve["fraction"], curve["probability"], color=METHODS[method], label=label, linewidth=2)
    better = "lower" if name == "deletion" else "higher"
    ax.set_title(f"{name}\n({better} is better)")
    ax.set_xlabel("fraction of pixels")
    ax.set_ylabel("probability")
    ax.set_ylim(bottom=0)
    ax.legend()


def _redundancy_bars(ax: Any, rows: list[dict[str, Any]]) -> None:
    ax.bar([row["step"].replace(", ", "\n") for row in rows], [row["redundancy"] for row in rows], color=COLOURS[0])
    ax.set_title("redundancy\n(lower is better)")


NOTES = {
    "superpixels": "Each pixel is assigned to its strongest token. SLIC and average pooling get as many segments. "
    "Accuracy: every segment is assigned its most frequent class. Recall: true borders with a segment border within "
    "0.75 % of the diagonal. Under-segmentation: leakage over true borders. Compactness: 1 for discs. Tokens need not "
    "be connected; components counts their connected parts.",
    "maps": "Redundancy: mass that the maps of two tokens share, mean over pairs. Token entropy: of a token over "
    "pixels. Pixel entropy: of a pixel over tokens. All from 0 to 1.",
    "pointing": "Hit: the maximum of the summed maps lies in a box. Energy: fraction of the maps inside the boxes. "
    "Chance: fraction of the image inside the boxes. Important tokens: maps weighted by gradient importance.",
    "curves": "Pixels are removed (or inserted into a blurred image) in the order of the last step's token importance; "
    "the probability is that of the predicted class.",
}


def page(scores: "Scores") -> str:
    """The scores as one self-contained HTML page."""
    from saccade.explanation.scores.score import rows_as_text

    titles = {"superpixels": "Tokens as superpixels", "maps": "Redundancy and entropy", "pointing": "Pointing game"}
    tables = []
    for name, title in titles.items():
        if rows := getattr(scores, name):
            heads, *body = rows_as_text(rows)
            numeric = [i for i, column in enumerate(heads) if column not in ("step", "method")]
            tables.append((title, NOTES[name], heads, body, numeric))
    if scores.curves:
        body = [(name, f"{curve['area']:.3f}") for name, curve in scores.curves.items()]
        tables.append(("Deletion and insertion", NOTES["curves"], ("curve", "area"), body, (1,)))
    return render("scores.html", scores=scores, chart=to_svg(chart(scores)), tables=tables)
