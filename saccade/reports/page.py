"""The skeleton of self-contained HTML pages: stylesheet (light, dark, phone, print), document, table; no script."""

from collections.abc import Sequence
from html import escape

STYLE = """
.saccade { --paper: #fff; --ink: #1a2028; --soft: #5b6472; --line: #e3e7ec; --card: #f6f8fa; --accent: #0072b2;
  color: var(--ink); background: var(--paper); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
@media (prefers-color-scheme: dark) { .saccade { --paper: #12161b; --ink: #e6eaef; --soft: #9aa5b1; --line: #2a323b;
  --card: #1a2027; --accent: #56b4e9; } }
.saccade * { box-sizing: border-box; }
.saccade main { max-width: 1240px; margin: 0 auto; padding: 28px 24px 80px; }
.saccade h1 { font-size: 28px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; }
.saccade h2 { font-size: 22px; margin: 0 0 14px; }
.saccade h3 { font-size: 17px; margin: 0 0 4px; }
.saccade p { margin: 0 0 10px; }
.saccade .soft, .saccade figcaption small { color: var(--soft); }
.saccade .warn { border-left: 4px solid #e69f00; background: var(--card); padding: 10px 14px; margin: 16px 0;
  border-radius: 0 6px 6px 0; }
.saccade nav { display: flex; flex-wrap: wrap; gap: 8px; margin: 18px 0 8px; }
.saccade nav a { color: var(--ink); text-decoration: none; border: 1px solid var(--line); border-radius: 999px;
  padding: 4px 12px; background: var(--card); font-size: 14px; }
.saccade a { color: var(--accent); }
.saccade table { border-collapse: collapse; margin: 8px 0 18px; font-variant-numeric: tabular-nums; font-size: 15px; }
.saccade th, .saccade td { text-align: left; padding: 5px 18px 5px 0; border-bottom: 1px solid var(--line);
  vertical-align: baseline; color: var(--ink); background: none; }
.saccade th { color: var(--soft); font-weight: 500; }
.saccade td.number, .saccade th.number { text-align: right; }
.saccade section.image { border-top: 1px solid var(--line); margin-top: 36px; padding-top: 28px; }
.saccade .head { display: flex; flex-wrap: wrap; gap: 28px; align-items: flex-start; margin-bottom: 12px; }
.saccade .head img { width: 260px; border-radius: 6px; display: block; }
.saccade .head > div { flex: 1 1 340px; }
.saccade .bar { display: inline-block; height: 9px; background: var(--accent); border-radius: 3px; min-width: 2px; }
.saccade .figure { margin: 30px 0 0; }
.saccade .figure > p { max-width: 86ch; font-size: 14.5px; }
.saccade .panels { display: grid; gap: 14px 12px; grid-template-columns: repeat(var(--columns), minmax(0, 1fr)); }
.saccade figure { margin: 0; min-width: 0; }
.saccade figure img { width: 100%; height: auto; display: block; border-radius: 4px; }
.saccade figure img.crisp { image-rendering: pixelated; }
.saccade figcaption { font-size: 13px; line-height: 1.35; margin-top: 5px; overflow-wrap: anywhere; }
.saccade figcaption small { display: block; font-size: 12.5px; }
.saccade .chip { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px;
  vertical-align: -1px; box-shadow: 0 0 0 1px rgba(128, 128, 128, .5); }
.saccade .chart svg { max-width: 100%; height: auto; color: var(--ink); }
.saccade .scroll { overflow-x: auto; }
@media (max-width: 720px) { .saccade .panels { grid-template-columns: repeat(var(--narrow), minmax(0, 1fr)); }
  .saccade main { padding: 20px 14px 60px; } }
@media print { .saccade .figure { break-inside: avoid; } }
"""


def document(title: str, body: str) -> str:
    """A complete HTML page with the given body."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>html, body {{ margin: 0; }}{STYLE}</style>\n</head>\n"
        f'<body class="saccade">\n{body}\n</body>\n</html>\n'
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = ()) -> str:
    """An HTML table; cells are HTML, columns in `numeric` are right-aligned."""

    def cells(row: Sequence[str], tag: str) -> str:
        attributes = [' class="number"' if i in numeric else "" for i in range(len(row))]
        return "".join(f"<{tag}{attribute}>{cell}</{tag}>" for attribute, cell in zip(attributes, row, strict=True))

    lines = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{cells(heads, "th")}</tr></thead><tbody>{lines}</tbody></table></div>'
    )
