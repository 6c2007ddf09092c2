"""Draw docs/figures/nuclei.png from a detector's predictions on the images of nuclei in tests/data:

saccade predict runs/svit_small_nuclei tests/data/nuclei-mini/test --out predictions
python tools/make_objects.py predictions --model "svit_small with Mask R-CNN"
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent))

from saccade.explanation.drawing.figure import Figure, Panel

DOCS = Path(__file__).parents[1] / "docs"
MINI = DOCS.parent / "tests/data/nuclei-mini"
CHOSEN = {
    "fluorescence-medium-05": "fluorescence, contrast stretched",
    "brightfield-02": "bright field",
    "fluorescence-large-05": "fluorescence, contrast stretched",
}
ZOOM = 2


def read_image(path: Path, stretch: bool) -> np.ndarray:
    image = Image.open(path).convert("RGB")
    if stretch:  # almost black otherwise
        values = np.asarray(image).astype(np.float32)
        image = Image.fromarray(np.clip(values * (235 / np.percentile(values, 99.5)), 0, 255).astype(np.uint8))
    return np.asarray(image.resize((image.width * ZOOM, image.height * ZOOM), Image.Resampling.LANCZOS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("predictions", type=Path, help="the folder that saccade predict wrote")
    parser.add_argument("--model", required=True, help="name of the detector in the caption")
    args = parser.parse_args()
    truth = json.loads((MINI / "annotations/instances_test.json").read_text())
    names = {image["id"]: Path(image["file_name"]).stem for image in truth["images"]}
    labelled = Counter(names[each["image_id"]] for each in truth["annotations"])
    entries = json.loads((args.predictions / "predictions.json").read_text())["predictions"]
    predicted = {Path(each["image"]).stem: len(each["objects"]) for each in entries}
    images = [
        Panel(read_image(MINI / f"test/{name}.jpg", "stretched" in kind), kind, f"{labelled[name]} nuclei in the truth")
        for name, kind in CHOSEN.items()
    ]
    predictions = [
        Panel(read_image(args.predictions / f"{name}_objects.png", False), "predicted", f"{predicted[name]} nuclei")
        for name in CHOSEN
    ]
    caption = f"{args.model}; held-out images of BBBC038v1 (Caicedo et al., Nature Methods, 2019), CC0."
    sheet = Figure("nuclei", "Detected nuclei", caption, images + predictions, 3).image(300)
    target = DOCS / "figures/nuclei.png"
    sheet.quantize(256, method=Image.Quantize.MAXCOVERAGE, kmeans=1).save(target, optimize=True)
    print(f"wrote {target}, {target.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
