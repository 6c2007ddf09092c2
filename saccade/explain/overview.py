"""Several models on several pictures, as one grid: a row a picture, a column a model."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from saccade.explain.drawing.figure import Panel
from saccade.explain.report import picture

STYLE = """
.saccade .lead { font-size: 18px; max-width: 68ch; color: var(--soft); margin-bottom: 22px; }
.saccade h1.large { font-size: clamp(30px, 5vw, 46px); letter-spacing: -.025em; }
.saccade .overview { display: grid; grid-template-columns: repeat(var(--columns), minmax(150px, 1fr)); gap: 16px 10px;
  min-width: calc(var(--columns) * 155px); margin: 10px 0 26px; }
.saccade .overview .name { font-weight: 600; align-self: end; overflow-wrap: anywhere; line-height: 1.25; }
.saccade .overview .name small { display: block; font-weight: 400; color: var(--soft); font-size: 13px; }
.saccade .overview figure img { aspect-ratio: 4 / 3; object-fit: cover; border-radius: 6px; }
.saccade .overview figcaption { font-size: 13.5px; }
.saccade .overview .first { position: sticky; left: 0; background: var(--paper); z-index: 1; padding-right: 4px; }
@media (max-width: 720px) { .saccade .overview { grid-template-columns: repeat(var(--columns), 132px);
  min-width: 0; width: max-content; } }
"""


class Column(NamedTuple):
    """One model: its name, a line about it, and a panel for every picture."""

    name: str
    note: str
    panels: list[Panel]


def overview(pictures: Sequence[Panel], columns: Sequence[Column], corner: str = "photograph") -> str:
    """The grid as HTML; on a narrow screen it scrolls sideways under the pictures' own column."""
    cells = [f'<div class="name first">{escape(corner)}</div>']
    cells += [
        f'<div class="name">{escape(column.name)}<small>{escape(column.note)}</small></div>' for column in columns
    ]
    for row, original in enumerate(pictures):
        cells.append(_cell(original, ' class="first"'))
        cells += [_cell(column.panels[row]) for column in columns]
    style = f"--columns: {len(columns) + 1}"
    return f'<div class="scroll"><div class="overview" style="{style}">{"".join(cells)}</div></div>'


def _cell(panel: Panel, mark: str = "") -> str:
    note = "".join(f"<small>{escape(line)}</small>" for line in panel.note.splitlines())
    return f"<figure{mark}>{picture(panel)}<figcaption>{escape(panel.label)}{note}</figcaption></figure>"
