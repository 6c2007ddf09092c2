"""The scores as a chart and as one HTML page."""

import io
from html import escape
from typing import TYPE_CHECKING, Any

from saccade._extras import require
from saccade.explain.report import document, table

if TYPE_CHECKING:
    from saccade.explain.scores.score import Scores

INK = "#1a2028"
PLACEHOLDER = "#010203"  # becomes the page's own text colour
COLOURS = {"tokens": "#0072b2", "SLIC": "#e69f00", "average pooling": "#8c96a3", "random": "#8c96a3"}
WORDS = {
    "accuracy": "achievable accuracy\n(higher is better)",
    "recall": "boundary recall\n(higher is better)",
    "undersegmentation": "under-segmentation error\n(lower is better)",
    "compactness": "compactness\n(1: discs)",
}


def chart(scores: "Scores", kind: str) -> bytes:
    """Bars of the superpixel numbers and the two curves, as PNG or SVG."""
    require("matplotlib", "train")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    ink = PLACEHOLDER if kind == "svg" else INK
    style = {
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "saccade",  # the same drawing is the same file
        "font.size": 10,
        "font.family": "sans-serif",
    }
    names = [name for name in WORDS if scores.superpixels]
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
            handles, by = axes[0].get_legend_handles_labels()
            figure.legend(handles, by, loc="outside upper left", ncols=3, frameon=False, fontsize=9)
        if not names and not kinds:
            _widths(axes[0], scores.maps)
        buffer = io.BytesIO()
        silent = dict.fromkeys(("Creator", "Date", "Format", "Type")) if kind == "svg" else {"Software": None}
        figure.savefig(buffer, format=kind, dpi=160, transparent=kind == "svg", metadata=silent)
    data = buffer.getvalue()
    return data.replace(PLACEHOLDER.encode(), b"currentColor") if kind == "svg" else data


def _bars(ax: Any, rows: list[dict[str, Any]], name: str) -> None:
    steps = list(dict.fromkeys(row["step"] for row in rows))
    rivals = list(dict.fromkeys(row["by"] for row in rows))
    for i, by in enumerate(rivals):
        values = [next(row[name] for row in rows if row["step"] == step and row["by"] == by) for step in steps]
        at = [k + (i - (len(rivals) - 1) / 2) * 0.27 for k in range(len(steps))]
        ax.bar(at, values, width=0.25, color=COLOURS[by], label=by)
    ax.set_title(WORDS[name], fontsize=10)
    ax.set_xticks(range(len(steps)), [step.replace(", ", "\n") for step in steps], fontsize=8)


def _curves(ax: Any, curves: dict[str, Any], name: str) -> None:
    for by in ("tokens", "random"):
        curve = curves[f"{name}, {by}"]
        label = f"{by}, area {curve['area']:.3f}"
        ax.plot(curve["share"], curve["probability"], color=COLOURS[by], label=label, linewidth=2)
    better = "lower" if name == "deletion" else "higher"
    ax.set_title(f"{name}\n({better} is better)", fontsize=10)
    ax.set_xlabel("share of pixels")
    ax.set_ylabel("probability")
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False, fontsize=8)


def _widths(ax: Any, rows: list[dict[str, Any]]) -> None:
    ax.bar([row["step"].replace(", ", "\n") for row in rows], [row["redundancy"] for row in rows], color="#0072b2")
    ax.set_title("redundancy\n(lower is better)", fontsize=10)


NOTES = {
    "superpixels": "Each pixel belongs to its strongest token. SLIC and average pooling get as many segments as there "
    "are tokens that lead somewhere. Accuracy: every segment takes its best class. Recall: true borders met within "
    "0.75 % of the diagonal. Under-segmentation: what leaks over true borders. Compactness: 1 for discs. Tokens need "
    "not be connected: pieces counts their parts.",
    "maps": "Redundancy: mass that two tokens' maps have in common, mean over pairs. Width: entropy of a token over "
    "pixels. Doubt: entropy of a pixel over tokens. All from 0 to 1.",
    "pointing": "Hit: the strongest pixel of the summed maps lies in a box. Energy: share of the maps inside the "
    "boxes. Chance: share of the image inside them. Important tokens are weighted by gradient.",
    "curves": "Pixels are removed (or brought into a blurred picture) in the order of the last step's important "
    "tokens; the probability is that of the model's own answer.",
}


def page(scores: "Scores") -> str:
    from saccade.explain.scores.score import rows_as_text

    drawing = chart(scores, "svg").decode()
    parts = [
        f"<main><h1>How good are the tokens of {escape(scores.model)}?</h1>",
        f'<p class="soft">{scores.pictures} pictures of {escape(scores.data)}; weights: {escape(scores.weights)}.</p>',
        f'<div class="chart">{drawing[drawing.index("<svg") :]}</div>',
    ]
    titles = {"superpixels": "Tokens as superpixels", "maps": "Alike and wide", "pointing": "Pointing at objects"}
    for name, title in titles.items():
        rows = getattr(scores, name)
        if rows:
            head, *body = rows_as_text(rows)
            numbers = [i for i, column in enumerate(head) if column not in ("step", "by")]
            cells = [[escape(cell) for cell in row] for row in body]
            note = f'<p class="soft">{NOTES[name]}</p>'
            parts.append(f'<div class="figure"><h3>{title}</h3>{note}{table(head, cells, numbers)}</div>')
    if scores.curves:
        body = [[escape(name), f"{curve['area']:.3f}"] for name, curve in scores.curves.items()]
        note = f'<p class="soft">{NOTES["curves"]}</p>'
        shown = table(("curve", "area"), body, (1,))
        parts.append(f'<div class="figure"><h3>Deletion and insertion</h3>{note}{shown}</div>')
    if scores.skipped:
        lines = "".join(f"<br>{escape(name)}: {escape(reason)}" for name, reason in scores.skipped.items())
        parts.append(f'<p class="warn">Left out:{lines}</p>')
    return document(f"Scores of {scores.model}", "\n".join([*parts, "</main>"]))
