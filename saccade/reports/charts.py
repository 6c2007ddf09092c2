"""Charts as inline SVG, with the colours of the page's style sheet."""

import math
from collections.abc import Callable, Sequence
from html import escape

Series = tuple[str, Sequence[float], Sequence[float]]  # name, x, y
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 26, 30


def line_chart(title: str, series: Sequence[Series], x_label: str, width: int = 440, height: int = 250) -> str:
    """Return line plots in the CSS colours --line-0, --line-1, …; with up to 60 points each has a dot and a tooltip."""
    series = [entry for entry in series if len(entry[1])]
    if not series:
        return ""
    xs = [x for _, line, _ in series for x in line]
    ys = [y for _, _, line in series for y in line if math.isfinite(y)]
    to_x = _scale(0, max(xs), LEFT, width - RIGHT)
    low, high, ticks = nice_range(min(ys), max(ys))
    to_y = _scale(low, high, height - BOTTOM, TOP)
    parts = [_frame(title, x_label, width, height, to_x, to_y, ticks, nice_range(0, max(xs))[2], max(xs))]
    for number, (name, line_x, line_y) in enumerate(series):
        points = [(x, y) for x, y in zip(line_x, line_y, strict=True) if math.isfinite(y)]
        path = " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in points)
        colour = f"var(--line-{number})"
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        if len(points) <= 60:
            for x, y in points:
                tip = f"{escape(name)} {y:.4g} at {x:.4g}"
                dot = f'<circle cx="{to_x(x):.1f}" cy="{to_y(y):.1f}" r="2.2" fill="{colour}">'
                parts.append(f"{dot}<title>{tip}</title></circle>")
        start = LEFT + 8 + 100 * number
        parts.append(f'<rect x="{start}" y="{height - 9}" width="12" height="3" fill="{colour}"/>')
        parts.append(f'<text x="{start + 16}" y="{height - 4}" class="small">{escape(name)}</text>')
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'


def bar_chart(rows: Sequence[tuple[str, float, str]], width: int = 440) -> str:
    """Return horizontal bars of percentages, from rows of (name, value, tooltip)."""
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
    """Return a confusion matrix with rows as fractions of their class; for up to about 60 classes."""
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
            fraction = matrix[row][column] / total
            if not fraction:
                continue
            colour = "var(--line-0)" if row == column else "var(--line-1)"
            tip = f"{names[row]} predicted as {names[column]}: {matrix[row][column]} ({100 * fraction:.1f} %)"
            x = start + column * cell
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{cell:.2f}" height="{cell:.2f}" fill="{colour}" '
                f'fill-opacity="{max(0.06, fraction):.2f}"><title>{escape(tip)}</title></rect>'
            )
            if cell >= 20 and fraction >= 0.005:
                parts.append(
                    f'<text x="{x + cell / 2:.1f}" y="{y + cell / 2 + 3:.1f}" text-anchor="middle" '
                    f'class="tiny">{100 * fraction:.0f}</text>'
                )
    side = start + count * cell
    parts.append(f'<rect x="{start}" y="{start}" width="{side - start:.1f}" height="{side - start:.1f}" class="edge"/>')
    return f'<svg viewBox="0 0 {width} {side + 4:.0f}" role="img">{"".join(parts)}</svg>'


def nice_range(low: float, high: float, count: int = 5) -> tuple[float, float, list[float]]:
    """Return round limits that contain the range, and round ticks between them."""
    if high <= low:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    rough = (high - low) / count
    power = 10 ** math.floor(math.log10(rough))
    step = min((m * power for m in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - rough))
    first, last = math.floor(low / step), math.ceil(high / step)
    return first * step, last * step, [number * step for number in range(first, last + 1)]


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = (high - low) or 1
    return lambda value: start + (value - low) / span * (end - start)


def _frame(
    title: str,
    x_label: str,
    width: int,
    height: int,
    to_x: Callable[[float], float],
    to_y: Callable[[float], float],
    y_ticks: Sequence[float],
    x_ticks: Sequence[float],
    x_max: float,
) -> str:
    """Return title, grid lines, tick labels and axis label."""
    parts = [f'<text x="{LEFT}" y="15" class="title">{escape(title)}</text>']
    for tick in y_ticks:
        y = to_y(tick)
        parts.append(f'<line x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end" class="small">{tick:.4g}</text>')
    for tick in x_ticks:
        if 0 <= tick <= x_max:
            text = f'<text x="{to_x(tick):.1f}" y="{height - 17}" text-anchor="middle" class="small">{tick:.4g}</text>'
            parts.append(text)
    label = f'<text x="{width - RIGHT}" y="{height - 4}" text-anchor="end" class="small">{escape(x_label)}</text>'
    return "".join([*parts, label])
