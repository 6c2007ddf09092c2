"""The page of claims and its figure, from assessments."""

import math
from collections.abc import Sequence
from typing import Any

from saccade.reports.charts import COLOURS, INK, SOFT, new_chart, style
from saccade.reproduce.assess import sentence
from saccade.reproduce.claim import METRICS
from saccade.reproduce.verdict import ALPHA, CONFIRMED, CONTRADICTED, NO_DIFFERENCE, POWER, UNDECIDED, UNMEASURED

VERDICTS = (CONFIRMED, NO_DIFFERENCE, UNDECIDED, CONTRADICTED, UNMEASURED)

METHOD = f"""## How a verdict is made

A run trains one arm with one seed; all arms of a claim share one recipe, fixed before the first run. The metric is that
of the validation set after the last epoch, in percent; a run that diverged counts with its last validation, or with 0
without one. Differences are paired by seed: runs of one seed see the same images in the same order with the same
augmentation. For every pair of arms the {100 - 200 * ALPHA:.0f} % interval of the mean difference (paired t test) is
compared with what the claim allows: above 0 for A > B, above -margin for A >= B, between -margin and margin for A = B
(two one-sided tests).

- **{CONFIRMED}**: the intervals of all pairs lie inside; the probability of a false confirmation is at most
  {100 * ALPHA:.0f} %.
- **{CONTRADICTED}**: the interval of a pair lies outside (the error is divided by the number of pairs).
- **{NO_DIFFERENCE}**: A > B, and neither order is shown.
- **{UNDECIDED}**: A = B or A >= B, and neither the claim nor its opposite is shown.

"Detectable" is the difference that the test finds with a probability of {100 * POWER:.0f} %, at the spread that was
measured; "power" the probability to confirm the claim if the paper's difference were true here. With few seeds both are
poor: a claim that is not confirmed is not refuted.
"""


MAX_WIDTH = 10.0  # points; wider intervals, as of arms that diverged, may leave the figure


def markdown(
    assessments: Sequence[dict[str, Any]],
    released: Sequence[dict[str, Any]] = (),
    figure: str | None = None,
    warning: str = "",
) -> str:
    """The page. `figure`: address of the figure; `warning`: a paragraph on results that are not the planned ones."""
    measured = [entry for entry in assessments if entry["verdict"] != UNMEASURED]
    parts = [warning] if warning else []
    parts.append(summary(assessments))
    if figure and measured:
        parts.append(f"![paired differences of all measured pairs]({figure})")
    parts.append(METHOD.rstrip())
    for paper in dict.fromkeys(entry["paper"] for entry in assessments):
        parts.append(f"## {paper}")
        parts += [section(entry) for entry in assessments if entry["paper"] == paper]
    if released:
        parts += ["## Released weights", *map(released_table, released)]
    return "\n\n".join(parts) + "\n"


def summary(assessments: Sequence[dict[str, Any]]) -> str:
    """Number of claims by verdict."""
    if all(entry["verdict"] == UNMEASURED for entry in assessments):
        return f"**None of the {len(assessments)} claims is measured yet.** Below is what will be measured and how."
    counts = {verdict: sum(entry["verdict"] == verdict for entry in assessments) for verdict in VERDICTS}
    parts = [f"{count} {verdict}" for verdict, count in counts.items() if count]
    text = f"**{len(assessments)} claims: {', '.join(parts)}.**"
    if left := [f"`{entry['claim']}`" for entry in assessments if entry["verdict"] == UNMEASURED]:
        text += f" Not measured: {', '.join(left)}."
    return text


def section(entry: dict[str, Any]) -> str:
    """One claim: statement, table of arms, pairs, verdict."""
    orders = ", ".join(f"{pair['order']}" for pair in entry["pairs"])
    parts = [
        f"### {entry['claim']}",
        f"{entry['table']}: {entry['statement']} ({orders}). Data: {entry['data']}.",
        arms_table(entry),
    ]
    if entry["verdict"] != UNMEASURED:
        parts.append(pairs_table(entry))
    parts.append(f"**{entry['verdict'].capitalize()}.** {sentence(entry)}")
    notes = [entry["note"]]
    if entry["runs"]:
        notes.append("Runs shared the device." if entry["shared"] else "Runs had the device to themselves.")
        notes.append(f"Measured on {'; '.join(entry['machines'])}.")
    if text := " ".join(filter(None, notes)):
        parts.append(text)
    return "\n\n".join(parts)


def arms_table(entry: dict[str, Any]) -> str:
    names = list(next(iter(entry["arms"].values()))["metrics"])
    heads = ["arm", "model"]
    for name in names:
        heads += [f"{METRICS[name]}, paper", "ours"]
    extra = [key for key in ("latency_ms",) if any(arm[key] for arm in entry["arms"].values())]
    if entry["runs"]:
        heads += ["M multiply-adds", "epochs", "minutes", *("ms per batch" for _ in extra)]
    rows = []
    for label, arm in entry["arms"].items():
        cells = [label, f"`{arm['model']}`{options_text(arm['kwargs'])}"]
        for name in names:
            metric = arm["metrics"][name]
            cells += ["–" if metric["printed"] is None else f"{metric['printed']:g}", measured_text(metric)]
        if entry["runs"]:
            cells.append("–" if arm["multiply_adds"] is None else f"{arm['multiply_adds'] / 1e6:,.0f}")
            cells += ["–" if arm[key] is None else f"{arm[key]:.1f}" for key in ("epochs", "minutes", *extra)]
        rows.append(cells)
    return table(heads, rows)


def options_text(kwargs: dict[str, Any]) -> str:
    return "".join(f" `{key}={value}`" for key, value in kwargs.items())


def measured_text(metric: dict[str, Any]) -> str:
    if metric["mean"] is None:
        return "–"
    spread = "" if metric["spread"] is None else f" ± {metric['spread']:.2f}"
    return f"{metric['mean']:.2f}{spread}"


def pairs_table(entry: dict[str, Any]) -> str:
    heads = ["pair", "paper", "ours", "90 % interval", "seeds", "detectable", "power", "verdict"]
    rows = []
    for pair in entry["pairs"]:
        printed = "–" if pair["printed"] is None else f"{pair['printed']:+.2f}"
        if pair["verdict"] == UNMEASURED:
            rows.append([pair["order"], printed, "–", "–", str(pair["seeds"]), "–", "–", UNMEASURED])
            continue
        power = "–" if pair["power"] is None else f"{pair['power']:.2f}"
        bounds = f"{pair['low']:+.2f} to {pair['high']:+.2f}"
        cells = [pair["order"], printed, f"{pair['mean']:+.2f}", bounds, str(pair["seeds"])]
        rows.append([*cells, f"{pair['detectable']:.2f}", power, pair["verdict"]])
    return table(heads, rows)


def released_table(entry: dict[str, Any]) -> str:
    """Paper against measured for released weights."""
    rows = [
        [row["label"], f"`{row['weights']}`", f"{row['printed']:g}", f"{row['top1']:.2f}", f"{row['difference']:+.2f}"]
        for row in entry["rows"]
    ]
    images = f"{entry['rows'][0]['count']} images of {entry['data']}"
    text = f"{entry['paper']} {entry['table']}: {entry['statement']}; {images}."
    return f"### {entry['claim']}\n\n{text}\n\n" + table(["row", "weights", "paper", "ours", "difference"], rows)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def draw(assessments: Sequence[dict[str, Any]], title: str = "") -> Any:
    """The figure: the interval of every measured pair, and the paper's difference."""
    rows = [
        (entry["claim"], pair)
        for entry in assessments
        for pair in entry["pairs"]
        if entry["verdict"] != UNMEASURED and pair["verdict"] != UNMEASURED
    ]
    colours = {CONFIRMED: COLOURS[2], CONTRADICTED: COLOURS[1], NO_DIFFERENCE: SOFT, UNDECIDED: COLOURS[4]}
    with style():
        figure, (axis,) = new_chart(width=8.5, height=1.2 + 0.24 * len(rows))
        for position, (_, pair) in enumerate(rows):
            colour = colours[pair["verdict"]]
            axis.plot([pair["low"], pair["high"]], [position, position], color=colour, linewidth=2)
            axis.plot(pair["mean"], position, "o", color=colour, markersize=5)
            if pair["printed"] is not None:
                axis.plot(pair["printed"], position, "|", color=INK, markersize=9)
        widths = [pair["high"] - pair["low"] for _, pair in rows]
        ends = [max(abs(pair[key] or 0) for key in ("low", "high", "printed")) for _, pair in rows]
        shown = [end for end, width in zip(ends, widths, strict=True) if width <= MAX_WIDTH] or ends or [1.0]
        limit = 1.1 * max(shown)
        axis.set_xlim(-limit, limit)
        for position, (_, pair) in enumerate(rows):
            if abs(pair["mean"]) > limit:
                text = f"{pair['mean']:+.0f} ± {(pair['high'] - pair['low']) / 2:.0f}"
                axis.annotate(text, (math.copysign(limit, pair["mean"]), position), fontsize=6, ha="right", va="bottom")
        axis.axvline(0, color=SOFT, linewidth=1)
        axis.set_yticks(range(len(rows)), [f"{claim}: {pair['order']}" for claim, pair in rows], fontsize=7)
        axis.invert_yaxis()
        axis.set_xlabel("difference in points, mean and 90 % interval; black bar: difference in the paper")
        for verdict in dict.fromkeys(pair["verdict"] for _, pair in rows):
            axis.plot([], [], "o-", color=colours[verdict], label=verdict)
        axis.legend(loc="best")
        axis.set_title(title)
    return figure
