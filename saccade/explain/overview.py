"""Several models on several images as one HTML grid: a row per image, a column per model."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from saccade.explain.drawing.figure import Panel
from saccade.explain.report import image_html

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
    """One model: its name, a note, and a panel per image."""

    name: str
    note: str
    panels: list[Panel]


def overview(images: Sequence[Panel], columns: Sequence[Column], corner: str = "photograph") -> str:
    """The grid as HTML; on a narrow screen it scrolls horizontally, the image column stays."""
    cells = [f'<div class="name first">{escape(corner)}</div>']
    cells += [
        f'<div class="name">{escape(column.name)}<small>{escape(column.note)}</small></div>' for column in columns
    ]
    for row, original in enumerate(images):
        cells.append(_cell(original, ' class="first"'))
        cells += [_cell(column.panels[row]) for column in columns]
    style = f"--columns: {len(columns) + 1}"
    return f'<div class="scroll"><div class="overview" style="{style}">{"".join(cells)}</div></div>'


def _cell(panel: Panel, attributes: str = "") -> str:
    note = "".join(f"<small>{escape(line)}</small>" for line in panel.note.splitlines())
    return f"<figure{attributes}>{image_html(panel)}<figcaption>{escape(panel.label)}{note}</figcaption></figure>"
