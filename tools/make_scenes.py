"""Draw docs/figures/scenes.jpg: held-out scenes and the detections of several runs.

python tools/make_scenes.py "Mask R-CNN=runs/svit_nano_mask_rcnn_scenes" "sparse=runs/sparseformer_nano_scenes"
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from saccade.data.sources.objects import trainable_objects
from saccade.data.synthetic.scenes import SceneObjects
from saccade.explanation.drawing.figure import Figure, Panel
from saccade.tasks.detection_drawing import draw_detections
from saccade.tasks.load import card_of, load

DOCS = Path(__file__).parents[1] / "docs"
CHOSEN = [3, 14, 27, 45]  # with small and occluded shapes
SIZE, SHOWN = 192, 384


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN", help="title, and folder or checkpoint of the run")
    args = parser.parse_args()
    shown, scenes = SceneObjects(64, SHOWN, "val"), SceneObjects(64, SIZE, "val")
    images = {index: shown.read(index) for index in CHOSEN}
    panels = []
    for index, image in images.items():
        labels = trainable_objects(shown.objects(index), image.size).labels
        names = ", ".join(shown.classes[label - 1] for label in labels)
        panels.append(Panel(np.asarray(image), f"scene {index}", names))
    for name, run in (each.split("=", 1) for each in args.runs):
        model = load(run)
        card = card_of(model)
        for index in CHOSEN:
            pixels = torch.from_numpy(np.array(scenes.read(index))).permute(2, 0, 1) / 255
            with torch.inference_mode():
                prediction = model([pixels])[0]
            prediction["boxes"] = prediction["boxes"] * (SHOWN / SIZE)
            if "masks" in prediction:
                prediction["masks"] = torch.nn.functional.interpolate(
                    prediction["masks"], size=(SHOWN, SHOWN), mode="bilinear"
                )
            drawn = draw_detections(images[index], prediction, card.classes, names=True)
            count = int((prediction["scores"] >= 0.5).sum())
            panels.append(Panel(np.asarray(drawn), name, f"{count} detections with a score of at least 0.5"))
    caption = f"Held-out scenes of the embedded set, at {SIZE} px; boxes, classes and scores."
    sheet = Figure("scenes", "Detected shapes", caption, panels, len(CHOSEN)).image(300)
    target = DOCS / "figures/scenes.jpg"
    sheet.save(target, quality=88, optimize=True)
    print(f"wrote {target}, {target.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
