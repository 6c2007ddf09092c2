"""Draw the figures of docs/explain.md and the README from the bundled photographs: `python tools/make_figures.py`."""

import sys
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent))

import saccade
from saccade.data.synthetic.photos import photo_paths
from saccade.explanation.drawing.figure import Figure

OUT = Path(__file__).parent.parent / "docs/figures"
FIGURES = {  # file: photograph, model, figure, panel width in pixels
    "svit.png": ("cat", "svit_nano", "super_tokens", 300),
    "vt.png": ("astronaut", "vt_nano", "assignment-1", 120),
    "paca.png": ("coffee", "paca_nano", "mosaic", 230),
    "paca_clusters.png": ("coffee", "paca_nano", "clusters", 170),
    "sparseformer.png": ("rocket", "sparseformer_nano", "sampling", 180),
}

OVERVIEW = (  # model, figure, panel, label
    ("svit_nano", "super_tokens", 2, "SViT: super tokens follow the edges"),
    ("paca_nano", "mosaic", 2, "PaCa: learned clusters"),
    ("sparseformer_nano", "sampling", 4, "SparseFormer: regions that move"),
    ("vt_nano", "mosaic", 1, "VT: 8 visual tokens"),
)
MAX_BYTES = 190_000


def overview(photo: str = "astronaut") -> Image.Image:
    """One photograph with the tokens of the four families, for the README."""
    panels = []
    for model, figure, index, label in OVERVIEW:
        image = saccade.explain(photo_paths()[photo], model, importance=())[0]
        panels.append(image.figures[figure].panels[index]._replace(label=label, note=model, colour=None))
    caption = "Embedded weights, trained on Tiny-ImageNet."
    return Figure("overview", "One photograph as a few tokens, by four families", caption, panels, 4).image(250)


def main() -> None:
    for file, (photo, model, figure, width) in FIGURES.items():
        image = saccade.explain(photo_paths()[photo], model, importance=())[0]
        sheet = image.figures[figure].image(width)
        sheet.save(OUT / file, optimize=True)
        if (OUT / file).stat().st_size > MAX_BYTES:  # MAXCOVERAGE keeps rare colours, which are the tokens'
            sheet.quantize(256, method=Image.Quantize.MAXCOVERAGE, kmeans=1).save(OUT / file, optimize=True)
        print(f"{OUT / file}: {(OUT / file).stat().st_size // 1024} KB, {sheet.width} x {sheet.height}")
    overview().quantize(256).save(OUT / "overview.png", optimize=True)


if __name__ == "__main__":
    main()
