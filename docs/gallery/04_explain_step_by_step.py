"""
Explain an image, step by step
==============================

``saccade.explain`` draws everything in one call. Here are its steps: record the tokens, draw their maps,
measure which of them matter.
"""

# %%
# A model and a photograph, prepared as the model's own data was.
import matplotlib.pyplot as plt
import timm
import torch
from PIL import Image

import saccade
from saccade.data import photo_paths

model = timm.create_model("paca_nano", pretrained=True).eval()  # weights are in the package
config = timm.data.resolve_model_data_config(model)
photo = Image.open(photo_paths()["coffee"]).convert("RGB")
images = timm.data.create_transform(**config)(photo)[None]
shown = images[0].movedim(0, 2) * torch.tensor(config["std"]) + torch.tensor(config["mean"])
side = images.shape[-1]

# %%
# Record. A trace links the pixels and the tokens of one step; ``forward`` still returns logits.
with torch.no_grad(), saccade.record(model) as traces:
    logits = model(images)
for trace in traces:
    print(trace.name, tuple(trace.maps().shape))
label = int(logits.argmax())
print("predicted:", model.pretrained_cfg["label_names"][label])

# %%
# The maps of the last step: where each cluster pools its pixels.
maps = traces[-1].maps()[0]
figure, axes = plt.subplots(2, 8, figsize=(12, 3.4))
for i, axis in enumerate(axes.flat):
    axis.imshow(shown, extent=(0, side, side, 0))
    axis.imshow(maps[i], extent=(0, side, side, 0), alpha=0.6, cmap="magma")
    axis.set_title(f"token {i}", fontsize=8)
    axis.axis("off")
figure.tight_layout()

# %%
# Which of them matter? Occlusion: the decrease of the logit when one token is multiplied by zero.
from saccade.explanation import class_score, occlusion_importance

importance = occlusion_importance(model, images, class_score(label), step=len(traces) - 1, count=len(maps))
order = importance.argsort(descending=True)
figure, axis = plt.subplots(figsize=(6, 2.5))
axis.bar([str(int(i)) for i in order], importance[order])
axis.set(xlabel="token", ylabel="decrease of the logit")
figure.tight_layout()

# %%
# All of it in one call, with the mosaic that colours every pixel by its strongest token.
explanation = saccade.explain(photo, model)[0]
print(sorted(explanation.figures))
plt.figure(figsize=(10, 3.5))
plt.imshow(explanation.figures["mosaic"].image())
plt.axis("off")
plt.tight_layout()
