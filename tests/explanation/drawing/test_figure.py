"""Figure sheets and files."""

import io

import numpy as np
from PIL import Image

from saccade.explanation.drawing.figure import Figure, Panel, encode_animation


def test_sheet_contains_every_panel_and_colour():
    image = np.full((30, 40, 3), 9, np.uint8)
    panels = [Panel(image, f"token {i}", "0.5", (200, 30, 30)) for i in range(5)]
    sheet = np.array(Figure("f", "A title", "A caption of some words", panels, columns=3).image()).astype(int)
    assert (sheet == 9).all(2).sum() == 5 * round(30 * 187 / 40) * 187  # panels enlarged to 187 px
    assert (sheet == [200, 30, 30]).all(2).sum() == 5 * 10 * 10  # squares of 12 px with an outline
    assert Image.open(io.BytesIO(Figure("f", "t", "c", panels)._repr_png_())).format == "PNG"


def test_animation_has_every_frame():
    frames = np.stack([np.full((8, 8, 3), 40 * i, np.uint8) for i in range(4)])
    for kind in ("GIF", "WEBP"):
        with Image.open(io.BytesIO(encode_animation(frames, kind))) as animation:
            assert (animation.format, animation.n_frames) == (kind, 4)
