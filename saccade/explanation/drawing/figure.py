"""Figures: titled panels in rows, drawn as one PNG sheet or as a grid in the HTML report."""

import io
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from saccade._files import write_file

INK, SOFT, PAPER = (26, 32, 40), (96, 104, 116), (255, 255, 255)
GAP, MARGIN = 14, 26


class Panel(NamedTuple):
    """One image of a figure."""

    image: np.ndarray  # (H, W, 3) uint8
    label: str = ""  # what it shows: "token 3"
    note: str = ""  # further lines: "occlusion +0.83"
    colour: tuple[int, int, int] | None = None  # of the token, drawn beside the label
    sharp: bool = False  # a matrix: PNG and nearest-neighbour scaling keep its cells sharp
    frames: np.ndarray | None = None  # (T, H, W, 3) uint8 of an animation


class Figure(NamedTuple):
    """Panels with a title and a caption, which names the model, the step and the number of tokens."""

    name: str  # file name without suffix
    title: str
    caption: str
    panels: list[Panel]
    columns: int = 4

    def image(self, width: int = 0) -> Image.Image:
        """The sheet: title, panels in rows with their labels, caption. `width` of a panel in pixels; 0 chooses one."""
        return draw_sheet(self, width or min(max(panel.image.shape[1] for panel in self.panels), 1400 // self.columns))

    def save(self, path: str | os.PathLike) -> Path:
        """Write the sheet as PNG, and every animated panel beside it as GIF and WebP."""
        animations = [panel.frames for panel in self.panels if panel.frames is not None]
        for number, frames in enumerate(animations):
            for kind in ("GIF", "WEBP"):
                name = f"{Path(path).stem}{f'-{number + 1}' if number else ''}.{kind.lower()}"
                write_file(Path(path).with_name(name), encode_animation(frames, kind))
        return write_file(path, self._repr_png_())

    def _repr_png_(self) -> bytes:  # Jupyter displays it
        return encode_image(np.array(self.image()), "PNG")


def draw_sheet(figure: Figure, width: int) -> Image.Image:
    """Title, rows of panels at most `width` pixels wide, and caption on one white sheet."""
    columns = min(figure.columns, len(figure.panels))
    width = min(width, max(panel.image.shape[1] for panel in figure.panels))
    if columns * width < 560:  # the caption needs 560 px
        width = -(-560 // columns)
    small, plain, bold = (_font(size) for size in (14, 15, 21))
    total = columns * width + (columns - 1) * GAP + 2 * MARGIN
    title = _wrap(figure.title, bold, total - 2 * MARGIN)
    caption = _wrap(figure.caption, plain, total - 2 * MARGIN)
    rows = [figure.panels[i : i + columns] for i in range(0, len(figure.panels), columns)]
    texts = [[_panel_text(panel, small, width) for panel in row] for row in rows]
    heights = [max(round(p.image.shape[0] * width / p.image.shape[1]) for p in row) for row in rows]
    lines = [max(len(text) for text in row) for row in texts]
    panels_height = sum(height + 20 * count + GAP for height, count in zip(heights, lines, strict=True))
    sheet = Image.new("RGB", (total, 2 * MARGIN + 28 * len(title) + 8 + panels_height + 22 * len(caption)), PAPER)
    draw = ImageDraw.Draw(sheet)
    y = MARGIN
    for line in title:
        draw.text((MARGIN, y), line, INK, bold)
        y += 28
    y += 8
    for row, row_texts, height, count in zip(rows, texts, heights, lines, strict=True):
        for column, (panel, text) in enumerate(zip(row, row_texts, strict=True)):
            x = MARGIN + column * (width + GAP)
            tall = round(panel.image.shape[0] * width / panel.image.shape[1])
            is_enlarged = panel.image.shape[1] < width
            method = Image.Resampling.NEAREST if is_enlarged else Image.Resampling.LANCZOS
            sheet.paste(Image.fromarray(panel.image).resize((width, tall), method), (x, y))
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


def encode_image(image: np.ndarray, kind: str = "PNG") -> bytes:
    """(H, W, 3) uint8 as a PNG or JPEG file."""
    buffer = io.BytesIO()
    options = {"quality": 88, "subsampling": 0} if kind == "JPEG" else {"compress_level": 6}
    Image.fromarray(image).save(buffer, kind, **options)
    return buffer.getvalue()


def encode_animation(frames: np.ndarray, kind: str = "WEBP", duration: int = 150) -> bytes:
    """(T, H, W, 3) uint8 as an endless GIF or WebP animation, `duration` milliseconds per frame."""
    buffer = io.BytesIO()
    first, *following = (Image.fromarray(frame) for frame in frames)
    first.save(buffer, kind, save_all=True, append_images=following, duration=duration, loop=0)
    return buffer.getvalue()


def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise RuntimeError("expected Pillow with FreeType support, got one without. Reinstall Pillow from PyPI.")
    return font


def _panel_text(panel: Panel, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    chip = 17 if panel.colour is not None else 0
    notes = [line for part in panel.note.splitlines() for line in _wrap(part, font, width)]
    return [*_wrap(panel.label, font, width - chip), *notes]


def _wrap(text: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """Break a text into lines of at most `width` pixels; Pillow's default font has Latin-1 only."""
    text = text.replace("–", "-").replace("…", "...").replace("→", "to").replace("×", "x").replace("’", "'")
    lines: list[str] = []
    for word in text.split():
        if lines and font.getlength(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
