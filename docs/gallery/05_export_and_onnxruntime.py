"""
Export to ONNX and run with onnxruntime
=======================================

The file contains standard operators only. Batch and image size stay free.
"""

# %%
# Export and compare with PyTorch.
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import timm
import torch
from PIL import Image

import saccade  # noqa: F401  (registers the models with timm)
from saccade.data import photo_paths
from saccade.inference import export_model

model = timm.create_model("svit_nano", pretrained=True).eval()  # weights are in the package
path = Path(tempfile.mkdtemp()) / "svit_nano.onnx"
export_model(model, path, dynamic=("batch", "size"))
print(f"{path.stat().st_size / 2**20:.1f} MB")

# %%
# Run it on two photographs, without PyTorch in the session.
import onnxruntime

transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
photos = [Image.open(photo_paths()[name]).convert("RGB") for name in ("cat", "rocket")]
images = np.stack([transform(photo).numpy() for photo in photos])
session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
(logits,) = session.run(None, {"images": images})

with torch.no_grad():
    expected = model(torch.from_numpy(images)).numpy()
print("largest difference from PyTorch:", f"{np.abs(logits - expected).max():.1e}")

# %%
# Any batch and size: the graph was traced once.
(larger,) = session.run(None, {"images": np.zeros((3, 3, 96, 160), np.float32)})
print(larger.shape)

figure, axes = plt.subplots(1, 2, figsize=(7, 3.2))
for axis, photo, row in zip(axes, photos, logits, strict=True):
    axis.imshow(photo)
    axis.set_title(model.pretrained_cfg["label_names"][int(row.argmax())])
    axis.axis("off")
figure.tight_layout()
