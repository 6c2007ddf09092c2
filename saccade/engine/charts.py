"""Charts as SVG text: sharp at any size, no plotting library, colours from the page around them."""

import math
from collections.abc import Sequence
from html import escape

Series = tuple[str, Sequence[float], Sequence[float]]  # name, x, y
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 26, 30


def line_chart(title: str, series: Sequence[Series], x_label: str, width: int = 440, height: int = 250) -> str:
    """Lines in the page's colours --line-0, --line-1, …; points far apart get a dot with its value."""
    series = [entry for entry in series if len(entry[1])]
    if not series:
        return ""
    xs = [x for _, line, _ in series for x in line]
    ys = [y for _, _, line in series for y in line if math.isfinite(y)]
    across = _scale(0, max(xs), LEFT, width - RIGHT)
    low, high, ticks = nice_range(min(ys), max(ys))
    up = _scale(low, high, height - BOTTOM, TOP)
    parts = [_frame(title, x_label, width, height, across, up, ticks, nice_range(0, max(xs))[2], max(xs))]
    for number, (name, line_x, line_y) in enumerate(series):
        points = [(across(x), up(y)) for x, y in zip(line_x, line_y, strict=True) if math.isfinite(y)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        colour = f"var(--line-{number})"
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        if len(points) <= 60:
            for (x, y), value, place in zip(points, line_y, line_x, strict=False):
                tip = f"{escape(name)} {value:.4g} at {place:.4g}"
                parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{colour}"><title>{tip}</title></circle>')
        start = LEFT + 8 + 100 * number
        parts.append(f'<rect x="{start}" y="{height - 9}" width="12" height="3" fill="{colour}"/>')
        parts.append(f'<text x="{start + 16}" y="{height - 4}" class="small">{escape(name)}</text>')
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'


def bar_chart(rows: Sequence[tuple[str, float, str]], width: int = 440) -> str:
    """Horizontal bars of percentages: (name, value, tip)."""
    step, start = 17, 150
    parts = []
    for number, (name, value, tip) in enumerate(rows):
        y = number * step
        length = (width - start - 50) * value / 100
        short = name if len(name) <= 22 else name[:21] + "…"
        parts.append(f'<text x="{start - 6}" y="{y + 12}" text-anchor="end" class="small">{escape(short)}</text>')
        parts.append(
            f'<rect x="{start}" y="{y + 3}" width="{max(length, 0.5):.1f}" height="11" rx="2" fill="var(--line-0)">'
            f"<title>{escape(name)}: {escape(tip)}</title></rect>"
        )
        parts.append(f'<text x="{start + length + 5:.1f}" y="{y + 12}" class="small">{value:.1f}</text>')
    return f'<svg viewBox="0 0 {width} {len(rows) * step + 4}" role="img">{"".join(parts)}</svg>'


def matrix_chart(matrix: Sequence[Sequence[int]], names: Sequence[str], width: int = 440) -> str:
    """A confusion matrix, every row in shares of its class; up to about 60 classes."""
    count, start = len(names), 92
    cell = (width - start - 4) / count
    parts = []
    for row in range(count):
        total = max(1, sum(matrix[row]))
        y = start + row * cell
        if cell >= 9:
            label = escape(names[row][:15])
            parts.append(
                f'<text x="{start - 4}" y="{y + cell / 2 + 3:.1f}" text-anchor="end" class="tiny">{label}</text>'
            )
            x = start + row * cell + cell / 2 + 3
            turn = f'transform="rotate(-60 {x:.1f} {start - 4})"'
            parts.append(f'<text x="{x:.1f}" y="{start - 4}" class="tiny" {turn}>{label}</text>')
        for column in range(count):
            share = matrix[row][column] / total
            if not share:
                continue
            colour = "var(--line-0)" if row == column else "var(--line-1)"
            tip = f"{names[row]} seen as {names[column]}: {matrix[row][column]} ({100 * share:.1f} %)"
            x = start + column * cell
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{cell:.2f}" height="{cell:.2f}" fill="{colour}" '
                f'fill-opacity="{max(0.06, share):.2f}"><title>{escape(tip)}</title></rect>'
            )
            if cell >= 20 and share >= 0.005:
                parts.append(
                    f'<text x="{x + cell / 2:.1f}" y="{y + cell / 2 + 3:.1f}" text-anchor="middle" '
                    f'class="tiny">{100 * share:.0f}</text>'
                )
    side = start + count * cell
    parts.append(f'<rect x="{start}" y="{start}" width="{side - start:.1f}" height="{side - start:.1f}" class="edge"/>')
    return f'<svg viewBox="0 0 {width} {side + 4:.0f}" role="img">{"".join(parts)}</svg>'


def nice_range(low: float, high: float, count: int = 5) -> tuple[float, float, list[float]]:
    """Round limits around a range, and round ticks between them."""
    if high <= low:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    rough = (high - low) / count
    power = 10 ** math.floor(math.log10(rough))
    step = min((m * power for m in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - rough))
    first, last = math.floor(low / step), math.ceil(high / step)
    return first * step, last * step, [number * step for number in range(first, last + 1)]


def _scale(low: float, high: float, start: float, end: float):
    span = (high - low) or 1
    return lambda value: start + (value - low) / span * (end - start)


def _frame(title, x_label, width, height, across, up, y_ticks, x_ticks, x_max) -> str:
    parts = [f'<text x="{LEFT}" y="15" class="title">{escape(title)}</text>']
    for tick in y_ticks:
        y = up(tick)
        parts.append(f'<line x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end" class="small">{tick:.4g}</text>')
    for tick in x_ticks:
        if 0 <= tick <= x_max:
            text = (
                f'<text x="{across(tick):.1f}" y="{height - 17}" text-anchor="middle" class="small">{tick:.4g}</text>'
            )
            parts.append(text)
    label = f'<text x="{width - RIGHT}" y="{height - 4}" text-anchor="end" class="small">{escape(x_label)}</text>'
    return "".join([*parts, label])
