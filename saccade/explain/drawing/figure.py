"""A figure: titled panels in rows. The same panels become a PNG sheet for papers and a grid on the HTML page."""

import io
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

INK, SOFT, PAPER = (26, 32, 40), (96, 104, 116), (255, 255, 255)
GAP, MARGIN = 14, 26


class Panel(NamedTuple):
    """One picture of a figure."""

    picture: np.ndarray  # (H, W, 3) uint8
    label: str = ""  # what it is: "token 3"
    note: str = ""  # its numbers: "0.83 of the probability"
    colour: tuple[int, int, int] | None = None  # the token's
    sharp: bool = False  # a matrix, whose cells keep their edges
    film: np.ndarray | None = None  # (T, H, W, 3) uint8 where the picture moves


class Figure(NamedTuple):
    """Panels under a title; the caption says what is seen, and of which model, stage and number of tokens."""

    name: str  # of its file
    title: str
    caption: str
    panels: list[Panel]
    columns: int = 4

    def image(self, width: int = 0) -> Image.Image:
        """The sheet: title, panels in rows with their labels, caption. `width` of a panel, 0 for a good one."""
        return draw_sheet(
            self, width or min(max(panel.picture.shape[1] for panel in self.panels), 1400 // self.columns)
        )

    def save(self, path: str | os.PathLike) -> Path:
        """Write the sheet; panels that move are written beside it as animated GIF and WebP."""
        for number, panel in enumerate(panel for panel in self.panels if panel.film is not None):
            for kind in ("GIF", "WEBP"):
                name = f"{Path(path).stem}{f'-{number + 1}' if number else ''}.{kind.lower()}"
                write(Path(path).with_name(name), animate(panel.film, kind))  # type: ignore[arg-type]
        return write(path, self._repr_png_())

    def _repr_png_(self) -> bytes:  # a notebook shows the sheet
        return encode(np.array(self.image()), "PNG")


def draw_sheet(figure: Figure, width: int) -> Image.Image:
    columns = min(figure.columns, len(figure.panels))
    width = min(width, max(panel.picture.shape[1] for panel in figure.panels))
    if columns * width < 560:  # room for the caption
        width = -(-560 // columns)
    small, plain, bold = (ImageFont.load_default(size) for size in (14, 15, 21))
    total = columns * width + (columns - 1) * GAP + 2 * MARGIN
    title = _wrap(figure.title, bold, total - 2 * MARGIN)
    caption = _wrap(figure.caption, plain, total - 2 * MARGIN)
    rows = [figure.panels[i : i + columns] for i in range(0, len(figure.panels), columns)]
    texts = [[_panel_text(panel, small, width) for panel in row] for row in rows]
    heights = [max(round(p.picture.shape[0] * width / p.picture.shape[1]) for p in row) for row in rows]
    lines = [max(len(text) for text in row) for row in texts]
    body = sum(height + 20 * count + GAP for height, count in zip(heights, lines, strict=True))
    sheet = Image.new("RGB", (total, 2 * MARGIN + 28 * len(title) + 8 + body + 22 * len(caption)), PAPER)
    draw = ImageDraw.Draw(sheet)
    y = MARGIN
    for line in title:
        draw.text((MARGIN, y), line, INK, bold)
        y += 28
    y += 8
    for row, row_texts, height, count in zip(rows, texts, heights, lines, strict=True):
        for column, (panel, text) in enumerate(zip(row, row_texts, strict=True)):
            x = MARGIN + column * (width + GAP)
            tall = round(panel.picture.shape[0] * width / panel.picture.shape[1])
            larger = panel.picture.shape[1] < width
            kind = Image.Resampling.NEAREST if larger else Image.Resampling.LANCZOS
            sheet.paste(Image.fromarray(panel.picture).resize((width, tall), kind), (x, y))
            for k, line in enumerate(text):
                left = x
                if panel.colour is not None and k == 0:
                    draw.rectangle([x, y + tall + 6, x + 11, y + tall + 17], fill=panel.colour, outline=SOFT)
                    left = x + 17
                draw.text((left, y + tall + 3 + 20 * k), line, INK if k == 0 else SOFT, small)
        y += height + 20 * count + GAP
    for line in caption:
        draw.text((MARGIN, y), line, SOFT, plain)
        y += 22
    return sheet


def encode(picture: np.ndarray, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    options = {"quality": 88, "subsampling": 0} if kind == "JPEG" else {"compress_level": 6}
    Image.fromarray(picture).save(buffer, kind, **options)
    return buffer.getvalue()


def animate(film: np.ndarray, kind: str = "WEBP", pause: int = 150) -> bytes:
    """(T, H, W, 3) -> an endless moving picture, `pause` milliseconds a frame."""
    buffer = io.BytesIO()
    first, *others = (Image.fromarray(frame) for frame in film)
    first.save(buffer, kind, save_all=True, append_images=others, duration=pause, loop=0)
    return buffer.getvalue()


def write(path: str | os.PathLike, content: bytes | str) -> Path:
    """Write a file whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _panel_text(panel: Panel, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    chip = 17 if panel.colour is not None else 0
    notes = [line for part in panel.note.splitlines() for line in _wrap(part, font, width)]
    return [*_wrap(panel.label, font, width - chip), *notes]


def _wrap(text: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """Break a text into lines that fit; the built-in font knows only Latin-1."""
    text = text.replace("–", "-").replace("…", "...").replace("→", "to").replace("×", "x").replace("’", "'")
    lines: list[str] = []
    for word in text.split():
        if lines and font.getlength(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
