"""Scores as a chart and as one HTML page."""

import io
from html import escape
from typing import TYPE_CHECKING, Any

from saccade._extras import require
from saccade.reports.page import document, table

if TYPE_CHECKING:
    from saccade.explain.scores.score import Scores

INK = "#1a2028"
PLACEHOLDER = "#010203"  # replaced by currentColor in SVG, for dark mode
COLOURS = {"tokens": "#0072b2", "SLIC": "#e69f00", "average pooling": "#8c96a3", "random": "#8c96a3"}
TITLES = {
    "accuracy": "achievable accuracy\n(higher is better)",
    "recall": "boundary recall\n(higher is better)",
    "undersegmentation": "under-segmentation error\n(lower is better)",
    "compactness": "compactness\n(1: discs)",
}


def chart(scores: "Scores", kind: str) -> bytes:
    """Bars of the superpixel metrics and the two curves, as PNG or SVG; `kind` is "png" or "svg"."""
    require("matplotlib", "train")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    ink = PLACEHOLDER if kind == "svg" else INK
    style: dict[Any, Any] = {
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "saccade",  # deterministic element ids
        "font.size": 10,
        "font.family": "sans-serif",
    }
    names = [name for name in TITLES if scores.superpixels]
    kinds = [name for name in ("deletion", "insertion") if f"{name}, tokens" in scores.curves]
    count = len(names) + len(kinds)
    if not count:
        count, kinds = 1, []
    with rc_context(style):
        figure = Figure(figsize=(3.1 * min(count, 3), 2.9 * -(-count // 3)), layout="constrained")
        axes = [figure.add_subplot(-(-count // 3), min(count, 3), i + 1) for i in range(count)]
        for name, ax in zip(names, axes, strict=False):
            _bars(ax, scores.superpixels, name)
        for name, ax in zip(kinds, axes[len(names) :], strict=False):
            _curves(ax, scores.curves, name)
        if names:
            handles, methods = axes[0].get_legend_handles_labels()
            figure.legend(handles, methods, loc="outside upper left", ncols=3, frameon=False, fontsize=9)
        if not names and not kinds:
            _redundancy_bars(axes[0], scores.maps)
        buffer = io.BytesIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type")) if kind == "svg" else {"Software": None}
        figure.savefig(buffer, format=kind, dpi=160, transparent=kind == "svg", metadata=no_metadata)
    data = buffer.getvalue()
    return data.replace(PLACEHOLDER.encode(), b"currentColor") if kind == "svg" else data


def _bars(ax: Any, rows: list[dict[str, Any]], name: str) -> None:
    steps = list(dict.fromkeys(row["step"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for i, method in enumerate(methods):
        values = [next(row[name] for row in rows if row["step"] == step and row["method"] == method) for step in steps]
        positions = [k + (i - (len(methods) - 1) / 2) * 0.27 for k in range(len(steps))]
        ax.bar(positions, values, width=0.25, color=COLOURS[method], label=method)
    ax.set_title(TITLES[name], fontsize=10)
    ax.set_xticks(range(len(steps)), [step.replace(", ", "\n") for step in steps], fontsize=8)


def _curves(ax: Any, curves: dict[str, Any], name: str) -> None:
    for method in ("tokens", "random"):
        curve = curves[f"{name}, {method}"]
        label = f"{method}, area {curve['area']:.3f}"
        ax.plot(curve["fraction"], curve["probability"], color=COLOURS[method], label=label, linewidth=2)
    better = "lower" if name == "deletion" else "higher"
    ax.set_title(f"{name}\n({better} is better)", fontsize=10)
    ax.set_xlabel("fraction of pixels")
    ax.set_ylabel("probability")
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False, fontsize=8)


def _redundancy_bars(ax: Any, rows: list[dict[str, Any]]) -> None:
    ax.bar([row["step"].replace(", ", "\n") for row in rows], [row["redundancy"] for row in rows], color="#0072b2")
    ax.set_title("redundancy\n(lower is better)", fontsize=10)


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
    from saccade.explain.scores.score import rows_as_text

    drawing = chart(scores, "svg").decode()
    parts = [
        f"<main><h1>Token scores of {escape(scores.model)}</h1>",
        f'<p class="soft">{scores.images} images of {escape(scores.data)}; weights: {escape(scores.weights)}.</p>',
        f'<div class="chart">{drawing[drawing.index("<svg") :]}</div>',
    ]
    titles = {"superpixels": "Tokens as superpixels", "maps": "Redundancy and entropy", "pointing": "Pointing game"}
    for name, title in titles.items():
        rows = getattr(scores, name)
        if rows:
            head, *body = rows_as_text(rows)
            numeric = [i for i, column in enumerate(head) if column not in ("step", "method")]
            cells = [[escape(cell) for cell in row] for row in body]
            note = f'<p class="soft">{NOTES[name]}</p>'
            parts.append(f'<div class="figure"><h3>{title}</h3>{note}{table(head, cells, numeric)}</div>')
    if scores.curves:
        body = [[escape(name), f"{curve['area']:.3f}"] for name, curve in scores.curves.items()]
        note = f'<p class="soft">{NOTES["curves"]}</p>'
        shown = table(("curve", "area"), body, (1,))
        parts.append(f'<div class="figure"><h3>Deletion and insertion</h3>{note}{shown}</div>')
    if scores.skipped:
        lines = "".join(f"<br>{escape(name)}: {escape(reason)}" for name, reason in scores.skipped.items())
        parts.append(f'<p class="warn">Skipped:{lines}</p>')
    return document(f"Scores of {scores.model}", "\n".join([*parts, "</main>"]))
