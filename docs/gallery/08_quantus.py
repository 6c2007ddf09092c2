"""
Quantus: is an explanation faithful?
====================================

Quantus evaluates explanations. ``explain_func`` gives it the tokens' importance as heat maps, to be compared with those
of other methods (``pip install 'saccade[explain]'``).
"""

# %%
# Two photographs, prepared as the model's own data was, and the predicted classes.
import matplotlib.pyplot as plt
import numpy as np
import quantus
import timm
import torch
from PIL import Image

from saccade.data import photo_paths
from saccade.explanation.adapters import explain_func

model = timm.create_model("paca_nano", pretrained=True).eval()  # weights are in the package
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
images = np.stack([transform(Image.open(photo_paths()[name]).convert("RGB")).numpy() for name in ("cat", "coffee")])
with torch.no_grad():
    labels = model(torch.from_numpy(images)).argmax(1).numpy()

# %%
# Heat maps: every token's map times its importance for the class. Beside them, the gradient of the pixels.
heats = {name: explain_func(model, images, labels, method=name) for name in ("gradient", "occlusion")}


def pixel_gradient(model: torch.nn.Module, inputs: np.ndarray, targets: np.ndarray, **_: object) -> np.ndarray:
    pixels = torch.as_tensor(inputs).requires_grad_()
    model(pixels).gather(1, torch.as_tensor(targets)[:, None]).sum().backward()
    return pixels.grad.abs().sum(1, keepdim=True).numpy()


heats["pixels"] = pixel_gradient(model, images, labels)
figure, axes = plt.subplots(2, 3, figsize=(8, 5.2))
for column, (name, maps) in enumerate(heats.items()):
    for row in range(2):
        axes[row, column].imshow(maps[row, 0], cmap="magma")
        axes[row, column].axis("off")
    axes[0, column].set_title(name)
figure.tight_layout()

# %%
# Sparseness (is the map concentrated?) and maximal sensitivity (does it change when the image hardly does?). Two images
# are enough to show the calls, not to rank methods.
common = dict(model=model, x_batch=images, y_batch=labels, device="cpu", channel_first=True)
for name, function, options in (
    ("tokens, gradient", explain_func, {"method": "gradient"}),
    ("pixels, gradient", pixel_gradient, {}),
):
    sparseness = quantus.Sparseness(disable_warnings=True)(**common, explain_func=function, explain_func_kwargs=options)
    sensitivity = quantus.MaxSensitivity(nr_samples=3, lower_bound=0.02, disable_warnings=True)(
        **common, explain_func=function, explain_func_kwargs=options
    )
    print(f"{name}: sparseness {np.mean(sparseness):.2f}, maximal sensitivity {np.mean(sensitivity):.2f}")
