"""One model per family as the backbone of other libraries' decoders and detectors."""

import pytest
import segmentation_models_pytorch as smp
import timm
import torch
import transformers
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool

IMAGES = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))
FAMILIES = {
    "paca_tiny": {"depths": (1, 1, 1, 1)},
    "svit_small": {"depths": (1, 1, 1, 1)},
    "sparseformer_tiny": {"repeats": 1},
    "sparseformer_btsp_clip_base": {"repeats": 1},
    "vt_resnet18": {},
}
families = pytest.mark.parametrize("name", FAMILIES)


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["Unet", "FPN", "UPerNet"])
@families
def test_smp_decoders_train_on_every_family(name, decoder):
    model = getattr(smp, decoder)(f"tu-{name}", encoder_weights=None, classes=3, **FAMILIES[name])
    logits = model(IMAGES)
    assert logits.shape == (2, 3, 64, 96)
    logits.square().mean().backward()
    assert any(parameter.grad is not None for parameter in model.encoder.parameters())


class TorchvisionPyramid(torch.nn.Module):
    """A `features_only` model and torchvision's FPN."""

    def __init__(self, name: str, width: int = 32):
        super().__init__()
        self.features = timm.create_model(name, features_only=True, **FAMILIES[name])
        self.fpn = FeaturePyramidNetwork(self.features.feature_info.channels(), width, LastLevelMaxPool())
        self.out_channels = width

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.fpn({str(i): level for i, level in enumerate(self.features(images))})


@families
def test_torchvision_mask_rcnn_predicts_on_every_family(name):
    torch.manual_seed(0)
    anchors = AnchorGenerator(tuple((size,) for size in (8, 16, 32, 64, 128)), ((0.5, 1.0, 2.0),) * 5)
    model = MaskRCNN(
        TorchvisionPyramid(name), 3, min_size=64, max_size=96, rpn_anchor_generator=anchors, box_score_thresh=0.0
    )
    with torch.no_grad():
        predictions = model.eval()(list(IMAGES))
    assert all(set(prediction) == {"boxes", "labels", "scores", "masks"} for prediction in predictions)
    assert all(len(prediction["boxes"]) > 0 for prediction in predictions)
    assert predictions[0]["masks"].shape[1:] == (1, 64, 96)


@pytest.mark.slow
@families
def test_transformers_timm_backbone_returns_the_maps_of_features_only(name):
    config = transformers.TimmBackboneConfig(backbone=name, use_pretrained_backbone=False, out_indices=[0, 1, 2, 3])
    backbone = transformers.TimmBackbone(config).eval()
    features = timm.create_model(name, features_only=True).eval()
    features.load_state_dict({key.removeprefix("_backbone."): v for key, v in backbone.state_dict().items()})
    assert list(backbone.channels) == features.feature_info.channels()
    with torch.no_grad():
        pairs = list(zip(backbone(IMAGES).feature_maps, features(IMAGES), (4, 8, 16, 32), strict=True))
    for level, expected, stride in pairs:
        assert level.shape[2:] == (64 // stride, 96 // stride)
        torch.testing.assert_close(level, expected)
