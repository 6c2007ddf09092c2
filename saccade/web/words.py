"""Fragments of HTML: answers as bars, facts of a token, notices. Everything that came from outside is escaped."""

from collections.abc import Sequence
from html import escape
from typing import Any

from saccade.web.look import Look


def notice(text: str, kind: str = "error") -> str:
    """A message in the page's own flow, where it stays until the next picture."""
    return f'<div class="notice {kind}" role="alert">{escape(text)}</div>'


def answers(look: Look) -> str:
    """The first five classes as bars, and what it took."""
    rows = "".join(
        f'<li><span class="bar" style="--share: {100 * chance:.2f}%"></span><span class="class">{escape(name)}</span>'
        f'<span class="chance">{chance:.1%}</span></li>'
        for name, chance in look.answers
    )
    height, width = look.images.shape[2:]
    grid = look.seen.steps[0].trace.size
    said = f'<ol class="answers">{rows}</ol>' if rows else '<p class="soft">This model names no classes.</p>'
    warning = ""
    if not look.subject.trained:
        warning = notice(
            "Fresh weights: nothing has been learned. The tokens show how the model works, the answers mean nothing.",
            "warn",
        )
    return (
        f"{warning}{said}"
        f'<p class="soft">{look.stages[0].step.count} tokens for {grid[0] * grid[1]:,} pixels of its first map · '
        f"{width} × {height} px · {1000 * look.seconds:.0f} ms</p>"
    )


def token(facts: dict[str, Any]) -> str:
    """One token in a line or two."""
    lines = [
        f'<span class="chip" style="background: {facts["colour"]}"></span>'
        f"<b>Token {facts['token']}</b> of {facts['tokens']}, {escape(facts['stage'])} · "
        f"leads on {facts['owns']:.1%} of the picture"
    ]
    if "rank" in facts:
        change = "falls" if facts["drop"] >= 0 else "rises"
        lines.append(
            f"No. {facts['rank']} in importance for <b>{escape(facts['answer'])}</b> "
            f"(gradient {facts['gradient']:+.3g}). Without it the score {change} by {abs(facts['drop']):.3g}."
        )
    return f'<div class="token">{"<br>".join(lines)}</div>'


def areas(rows: Sequence[dict[str, Any]]) -> str:
    """Classes of a segmentation with their colours and shares."""
    lines = "".join(
        f'<li><span class="bar" style="--share: {100 * row["share"]:.2f}%; background: {row["colour"]}"></span>'
        f'<span class="class"><span class="chip" style="background: {row["colour"]}"></span>'
        f'{escape(row["name"])}</span><span class="chance">{row["share"]:.1%}</span></li>'
        for row in rows
    )
    return f'<ol class="answers areas">{lines}</ol>'
