"""
Features in smp and torchvision
===============================

The models are registered with timm, so every library that takes timm backbones takes them.
"""

# %%
# ``features_only=True`` gives feature maps at strides 4 to 32, for any input size.
import matplotlib.pyplot as plt
import timm
import torch

import saccade  # noqa: F401  (registers the models with timm)

backbone = timm.create_model("paca_nano", features_only=True, pretrained=True).eval()
print(list(zip(backbone.feature_info.reduction(), backbone.feature_info.channels(), strict=True)))

# %%
# **segmentation_models_pytorch** names timm encoders ``tu-…``. Its decoders then read the features.
import segmentation_models_pytorch as smp

segmenter = smp.FPN("tu-paca_nano", encoder_weights=None, classes=3).eval()
with torch.no_grad():
    print(segmenter(torch.randn(1, 3, 128, 160)).shape)

# %%
# **torchvision**'s detectors read a dict of feature maps: wrap the backbone and give it a feature pyramid.
from collections import OrderedDict

from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import FeaturePyramidNetwork


class PyramidBackbone(nn.Module):
    def __init__(self, name: str, out_channels: int = 64):
        super().__init__()
        self.body = timm.create_model(name, features_only=True)
        self.fpn = FeaturePyramidNetwork(self.body.feature_info.channels(), out_channels)
        self.out_channels = out_channels

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return self.fpn(OrderedDict((str(i), features) for i, features in enumerate(self.body(images))))


anchors = AnchorGenerator(((16,), (32,), (64,), (128,)), ((0.5, 1.0, 2.0),) * 4)
detector = FasterRCNN(PyramidBackbone("svit_nano"), num_classes=5, rpn_anchor_generator=anchors, min_size=128)
target = {"boxes": torch.tensor([[8.0, 8.0, 60.0, 60.0]]), "labels": torch.tensor([1])}
print({name: round(loss.item(), 2) for name, loss in detector([torch.rand(3, 128, 160)], [target]).items()})

# %%
# The feature maps of a photograph: the channel of the largest variance per stride.
from PIL import Image

from saccade.data import photo_paths

photo = Image.open(photo_paths()["coffee"]).convert("RGB").resize((256, 160))
transform = timm.data.create_transform((3, 160, 256), crop_pct=1.0)
with torch.no_grad():
    maps = backbone(transform(photo)[None])
figure, axes = plt.subplots(1, 5, figsize=(12, 2))
axes[0].imshow(photo)
for axis, features, stride in zip(axes[1:], maps, backbone.feature_info.reduction(), strict=True):
    axis.imshow(features[0, features[0].var((1, 2)).argmax()])
    axis.set_title(f"stride {stride}")
for axis in axes:
    axis.axis("off")
figure.tight_layout()
