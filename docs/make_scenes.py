"""Draw docs/pictures/scenes.jpg: held-out scenes, and what detectors found in them.

python docs/make_scenes.py "Mask R-CNN=runs/svit_nano_mask_rcnn_scenes" "sparse=runs/sparseformer_nano_scenes"
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from saccade.data.objects import SceneObjects, learnable
from saccade.explain.drawing.figure import Figure, Panel
from saccade.tasks.detections import draw_detections
from saccade.tasks.open import open_task_model

HERE = Path(__file__).parent
CHOSEN = [3, 14, 27, 45]  # with small shapes, and shapes in front of others
SIZE, SHOWN = 192, 384


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN", help="what it is called, and its folder or file")
    args = parser.parse_args()
    shown, scenes = SceneObjects(64, SHOWN, "val"), SceneObjects(64, SIZE, "val")
    pictures = {index: shown.read(index) for index in CHOSEN}
    panels = []
    for index, picture in pictures.items():
        labels = learnable(shown.objects(index), picture.size).labels
        names = ", ".join(shown.classes[label - 1] for label in labels)
        panels.append(Panel(np.asarray(picture), f"scene {index}", names))
    for name, run in (each.split("=", 1) for each in args.runs):
        model, card = open_task_model(run)
        for index in CHOSEN:
            image = torch.from_numpy(np.array(scenes.read(index))).permute(2, 0, 1) / 255
            with torch.inference_mode():
                found = model([image])[0]
            found["boxes"] = found["boxes"] * (SHOWN / SIZE)
            if "masks" in found:
                found["masks"] = torch.nn.functional.interpolate(found["masks"], size=(SHOWN, SHOWN), mode="bilinear")
            drawn = draw_detections(pictures[index], found, card.classes, names=True)
            count = int((found["scores"] >= 0.5).sum())
            panels.append(Panel(np.asarray(drawn), name, f"{count} found with a score of at least 0.5"))
    caption = f"Held-out scenes of the embedded set, seen at {SIZE} px; boxes, classes and scores."
    sheet = Figure("scenes", "Shapes, one by one", caption, panels, len(CHOSEN)).image(300)
    target = HERE / "pictures/scenes.jpg"
    sheet.save(target, quality=88, optimize=True)
    print(f"wrote {target}, {target.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
