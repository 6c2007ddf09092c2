"""Draw docs/pictures/nuclei.png from what a detector found in the pictures of nuclei that the tests bring:

saccade predict runs/svit_small_nuclei tests/data/nuclei-mini/test --out predictions
python docs/make_objects.py predictions --model "svit_small under Mask R-CNN"
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent))

from saccade.explain.drawing.figure import Figure, Panel

HERE = Path(__file__).parent
MINI = HERE.parent / "tests/data/nuclei-mini"
CHOSEN = {
    "fluorescence-medium-05": "fluorescence, contrast stretched",
    "brightfield-02": "bright field",
    "fluorescence-large-05": "fluorescence, contrast stretched",
}
ENLARGED = 2


def picture(path: Path, stretch: bool) -> np.ndarray:
    image = Image.open(path).convert("RGB")
    if stretch:  # to the eye these are black
        values = np.asarray(image).astype(np.float32)
        image = Image.fromarray(np.clip(values * (235 / np.percentile(values, 99.5)), 0, 255).astype(np.uint8))
    return np.asarray(image.resize((image.width * ENLARGED, image.height * ENLARGED), Image.Resampling.LANCZOS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("predictions", type=Path, help="the folder that saccade predict wrote")
    parser.add_argument("--model", required=True, help="what found them, in words")
    args = parser.parse_args()
    truth = json.loads((MINI / "annotations/instances_test.json").read_text())
    names = {image["id"]: Path(image["file_name"]).stem for image in truth["images"]}
    labelled = Counter(names[each["image_id"]] for each in truth["annotations"])
    told = json.loads((args.predictions / "predictions.json").read_text())["predictions"]
    found = {Path(each["image"]).stem: len(each["objects"]) for each in told}
    above = [
        Panel(picture(MINI / f"test/{name}.jpg", "stretched" in kind), kind, f"{labelled[name]} nuclei in the truth")
        for name, kind in CHOSEN.items()
    ]
    below = [
        Panel(picture(args.predictions / f"{name}_objects.png", False), "found", f"{found[name]} nuclei")
        for name in CHOSEN
    ]
    caption = f"{args.model}; held-out pictures of BBBC038v1 (Caicedo et al., Nature Methods, 2019), CC0."
    sheet = Figure("nuclei", "Nuclei, one by one", caption, above + below, 3).image(300)
    target = HERE / "pictures/nuclei.png"
    sheet.quantize(256, method=Image.Quantize.MAXCOVERAGE, kmeans=1).save(target, optimize=True)
    print(f"wrote {target}, {target.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
