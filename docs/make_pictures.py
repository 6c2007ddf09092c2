"""Draw the pictures of docs/explain.md from the bundled photographs: `python docs/make_pictures.py`."""

import sys
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent))

import saccade
from saccade.data.photos import photo_paths

PICTURES = {  # file: photograph, model, figure, pixels across a panel
    "svit.png": ("cat", "svit_small", "super_tokens", 300),
    "vt.png": ("astronaut", "vt_resnet18", "assignment-1", 120),
    "paca.png": ("coffee", "paca_small", "mosaic", 230),
    "sparseformer.png": ("rocket", "sparseformer_tiny", "looking", 180),
}

LIMIT = 190_000  # bytes

if __name__ == "__main__":
    for file, (photo, model, figure, width) in PICTURES.items():
        found = saccade.explain(photo_paths()[photo], model, importance=())[0]
        sheet = found.figures[figure].image(width)
        target = Path(__file__).parent / "pictures" / file
        sheet.save(target, optimize=True)
        if target.stat().st_size > LIMIT:  # rare colours are kept: they are the tokens'
            sheet.quantize(256, method=Image.Quantize.MAXCOVERAGE).save(target, optimize=True)
        print(f"{target}: {target.stat().st_size // 1024} KB, {sheet.width} x {sheet.height}")
