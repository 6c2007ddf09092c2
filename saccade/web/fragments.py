"""HTML fragments of the page: predictions, token summary, notices. All external text is escaped."""

from collections.abc import Sequence
from html import escape
from typing import Any

from saccade.web.inspection import Inspection


def notice(text: str, kind: str = "error") -> str:
    """Return a message box."""
    return f'<div class="notice {kind}" role="alert">{escape(text)}</div>'


def predictions_list(inspection: Inspection) -> str:
    """Return the top five classes as bars, with token count, input size and time."""
    rows = "".join(
        f'<li><span class="bar" style="--width: {100 * value:.2f}%"></span><span class="class">{escape(name)}</span>'
        f'<span class="value">{value:.1%}</span></li>'
        for name, value in inspection.predictions
    )
    height, width = inspection.inputs.shape[2:]
    grid = inspection.observation.steps[0].trace.size
    listing = f'<ol class="predictions">{rows}</ol>' if rows else '<p class="soft">This model has no classes.</p>'
    warning = ""
    if not inspection.subject.trained:
        warning = notice(
            "Randomly initialised weights: the tokens show how the model groups pixels. Predictions are meaningless.",
            "warn",
        )
    return (
        f"{warning}{listing}"
        f'<p class="soft">{inspection.stages[0].step.count} tokens, {grid[0] * grid[1]:,} pixels in the first map · '
        f"{width} × {height} px · {1000 * inspection.seconds:.0f} ms</p>"
    )


def token_summary(summary: dict[str, Any]) -> str:
    """Return the summary of one token."""
    lines = [
        f'<span class="chip" style="background: {summary["colour"]}"></span>'
        f"<b>Token {summary['token']}</b> of {summary['tokens']}, {escape(summary['stage'])} · "
        f"strongest on {summary['area']:.1%} of the image"
    ]
    if "rank" in summary:
        change = "falls" if summary["drop"] >= 0 else "rises"
        lines.append(
            f"Importance rank {summary['rank']} for <b>{escape(summary['target'])}</b> "
            f"(gradient {summary['gradient']:+.3g}). Without it the logit {change} by {abs(summary['drop']):.3g}."
        )
    return f'<div class="token">{"<br>".join(lines)}</div>'


def areas_list(rows: Sequence[dict[str, Any]]) -> str:
    """Return the classes of a segmentation with colour and area."""
    lines = "".join(
        f'<li><span class="bar" style="--width: {100 * row["share"]:.2f}%; background: {row["colour"]}"></span>'
        f'<span class="class"><span class="chip" style="background: {row["colour"]}"></span>'
        f'{escape(row["name"])}</span><span class="value">{row["share"]:.1%}</span></li>'
        for row in rows
    )
    return f'<ol class="predictions areas">{lines}</ol>'
