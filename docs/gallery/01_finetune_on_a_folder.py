"""
Fine-tune on a folder of images
===============================

A folder with one sub-folder per class is all that training needs. Here it is cut from the bundled photographs, so that
the example runs without a download.
"""

# %%
# The data: 24 crops of each of three photographs.
import random
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
from PIL import Image

import saccade
from saccade.data import photo_paths

random.seed(0)
folder = Path(tempfile.mkdtemp())
for name in ("cat", "coffee", "rocket"):
    (folder / "photos" / name).mkdir(parents=True)
    photo = Image.open(photo_paths()[name]).convert("RGB")
    for i in range(24):
        side = random.randint(120, min(photo.size))
        x, y = random.randint(0, photo.width - side), random.randint(0, photo.height - side)
        photo.crop((x, y, x + side, y + side)).resize((64, 64)).save(folder / "photos" / name / f"{i}.jpg")

# %%
# Train: the embedded weights of ``svit_nano`` with a new classifier, frozen but for that classifier. The command line
# does the same: ``saccade train --model svit_nano --data photos/ --freeze``.
run = saccade.train(
    model="svit_nano", data=folder / "photos", out=folder / "run", size=64, epochs=3, batch=16, freeze=True,
    progress=False, device="cpu",
)  # fmt: skip
print(f"top-1 on the images held out: {run.metrics['top1']:.0f} %")

# %%
# The result is a model with its class names and preprocessing.
model = saccade.load(folder / "run")
predictions = saccade.predict(model, [photo_paths()[name] for name in ("cat", "coffee", "rocket")])
figure, axes = plt.subplots(1, 3, figsize=(9, 3))
for axis, prediction in zip(axes, predictions, strict=True):
    axis.imshow(prediction.image)
    axis.set_title(f"{prediction.label}, {prediction.probability:.0%}")
    axis.axis("off")
figure.tight_layout()
