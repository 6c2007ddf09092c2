"""
Captum: attributions over tokens
================================

Captum attributes a prediction to pixels. A token model offers fewer and larger things to attribute to: its tokens. The
adapters of ``saccade.explanation.adapters`` connect both (``pip install 'saccade[explain]'``).
"""

# %%
# A model and a photograph, prepared as the model's own data was.
import matplotlib.pyplot as plt
import timm
import torch
from captum.attr import FeatureAblation, IntegratedGradients
from PIL import Image

from saccade.data import photo_paths
from saccade.explanation.adapters import TokenModel, feature_mask

model = timm.create_model("svit_nano", pretrained=True).eval()  # weights are in the package
config = timm.data.resolve_model_data_config(model)
images = timm.data.create_transform(**config)(Image.open(photo_paths()["cat"]).convert("RGB"))[None]
with torch.no_grad():
    label = int(model(images).argmax())
print("predicted:", model.pretrained_cfg["label_names"][label])

# %%
# **Pixels grouped by token.** ``feature_mask`` numbers every pixel by its strongest token. Captum then ablates one
# token's pixels after the other, instead of single pixels.
mask = feature_mask(model, images)
print("groups:", int(mask.max()) + 1)
ablation = FeatureAblation(model).attribute(images, target=label, feature_mask=mask)

# %%
# **Tokens themselves.** ``TokenModel`` is the model as a function of one factor per token of the last step. Integrated
# gradients from 0 (no token) to 1 (the model as it is) add up to the difference of the logits.
tokens = TokenModel(model, images)
gates = tokens.gates.clone().requires_grad_()
values = IntegratedGradients(tokens).attribute(gates, target=label, additional_forward_args=images, n_steps=16)
with torch.no_grad():
    difference = (tokens(tokens.gates, images) - tokens(torch.zeros_like(gates), images))[0, label]
print(f"sum of the attributions {values.sum():.2f}, difference of the logits {difference:.2f}")

# %%
# Both, as heat maps on the image.
shown = images[0].movedim(0, 2) * torch.tensor(config["std"]) + torch.tensor(config["mean"])
heats = {
    "photograph": None,
    "ablation by token": ablation.sum(1)[0],
    "integrated gradients": tokens.to_pixels(values)[0, 0],
}
figure, axes = plt.subplots(1, 3, figsize=(10, 3.6))
for axis, (title, heat) in zip(axes, heats.items(), strict=True):
    axis.imshow(shown.clamp(0, 1))
    if heat is not None:
        limit = float(heat.abs().max())
        axis.imshow(heat.detach(), cmap="RdBu_r", vmin=-limit, vmax=limit, alpha=0.65)
    axis.set_title(title)
    axis.axis("off")
figure.tight_layout()
