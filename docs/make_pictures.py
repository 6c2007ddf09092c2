"""Draw the pictures of docs/explain.md from the bundled photographs: `python docs/make_pictures.py`."""

import sys
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent))

import saccade
from saccade.data.photos import photo_paths

PICTURES = {  # file: photograph, model, figure, pixels across a panel
    "svit.png": ("cat", "svit_nano", "super_tokens", 300),
    "vt.png": ("astronaut", "vt_nano", "assignment-1", 120),
    "paca.png": ("coffee", "paca_nano", "mosaic", 230),
    "sparseformer.png": ("rocket", "sparseformer_nano", "looking", 180),
}

OVERVIEW = (  # model, figure, which of its panels
    ("svit_nano", "super_tokens", 2, "SViT: super tokens follow the edges"),
    ("paca_nano", "mosaic", 2, "PaCa: learned clusters"),
    ("sparseformer_nano", "looking", 4, "SparseFormer: regions that move"),
    ("vt_nano", "mosaic", 1, "VT: 8 visual tokens"),
)
LIMIT = 190_000  # bytes


def overview(photo: str = "astronaut") -> Image.Image:
    """One photograph through the eyes of the four families, for the README."""
    from saccade.explain.drawing.figure import Figure

    panels = []
    for model, figure, number, label in OVERVIEW:
        found = saccade.explain(photo_paths()[photo], model, importance=())[0]
        panels.append(found.figures[figure].panels[number]._replace(label=label, note=model, colour=None))
    caption = "The weights that come with the package, learned from Tiny-ImageNet."
    return Figure("overview", "One photograph, four ways to see it as a few tokens", caption, panels, 4).image(250)


if __name__ == "__main__":
    for file, (photo, model, figure, width) in PICTURES.items():
        found = saccade.explain(photo_paths()[photo], model, importance=())[0]
        sheet = found.figures[figure].image(width)
        target = Path(__file__).parent / "pictures" / file
        sheet.save(target, optimize=True)
        if target.stat().st_size > LIMIT:  # rare colours are kept: they are the tokens'
            sheet.quantize(256, method=Image.Quantize.MAXCOVERAGE, kmeans=1).save(target, optimize=True)
        print(f"{target}: {target.stat().st_size // 1024} KB, {sheet.width} x {sheet.height}")
    overview().quantize(256).save(Path(__file__).parent / "pictures" / "overview.png", optimize=True)
