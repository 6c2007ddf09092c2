"""Feature pyramid of detectors."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import saccade
from saccade.heads.pyramid import Pyramid
from saccade.heads.vt_fpn import VTPyramid
from tests.heads.small_detectors import WIDTH, Backbone


def test_pyramid_adds_a_level_of_stride_64():
    model = Pyramid(Backbone(), [8] * 4, WIDTH)
    levels = model(torch.rand(1, 3, 64, 96))
    assert list(levels) == ["0", "1", "2", "3", "pool"]
    assert [tuple(level.shape) for level in levels.values()] == [
        (1, WIDTH, *size) for size in ((16, 24), (8, 12), (4, 6), (2, 3), (1, 2))
    ]
    torch.testing.assert_close(levels["pool"], levels["3"][:, :, ::2, ::2])
    assert model.out_channels == WIDTH


def test_pyramid_sums_lateral_maps_top_down():
    """FPN Fig. 3: output 3x3 convolution of lateral 1x1 plus the nearest-upsampled coarser sum."""
    torch.manual_seed(0)
    model = Pyramid(Backbone(), [8] * 4, WIDTH)
    images = torch.rand(1, 3, 64, 96)
    with torch.no_grad():
        features, levels = model.body(images), model(images)
        coarser = None
        for i in (3, 2, 1, 0):
            lateral = model.fpn.inner_blocks[i](features[i])
            coarser = lateral if coarser is None else lateral + F.interpolate(coarser, lateral.shape[2:])
            torch.testing.assert_close(levels[str(i)], model.fpn.layer_blocks[i](coarser))


def test_norm_follows_every_convolution_of_the_pyramid():
    plain, normed = (Pyramid(Backbone(), [8] * 4, WIDTH, norm) for norm in (None, nn.BatchNorm2d))
    counts = [sum(isinstance(m, nn.BatchNorm2d) for m in model.fpn.modules()) for model in (plain, normed)]
    assert counts == [0, 8]


@pytest.mark.shows("VT-81")
def test_vt_fpn_is_a_neck_of_detectors():
    """The levels are those of `VTPyramid`; the fifth is every second row and column of the coarsest."""
    torch.manual_seed(0)
    options = dict(token_dim=32, num_tokens=4, num_heads=4)
    model = Pyramid(Backbone(), [8] * 4, 16, neck="vt_fpn", **options).eval()
    reference = VTPyramid([8] * 4, 16, **options).eval()
    for norm in model.fpn.modules():
        if isinstance(norm, nn.BatchNorm1d):
            nn.init.ones_(norm.weight)
    reference.load_state_dict(model.fpn.state_dict())
    images = torch.rand(1, 3, 128, 96)
    with torch.no_grad():
        levels, expected = model(images), reference(list(model.body(images)))
    assert list(levels) == ["0", "1", "2", "3", "pool"]
    torch.testing.assert_close(list(levels.values())[:4], expected)
    torch.testing.assert_close(levels["pool"], expected[3][:, :, ::2, ::2])


@pytest.mark.shows("VT-81")
def test_detector_with_vt_fpn_trains():
    model = saccade.create_detector(
        "resnet10t", "mask_rcnn", num_classes=2, min_size=64, max_size=64, neck="vt_fpn", width=64,
        neck_kwargs=dict(token_dim=64, num_tokens=4, num_heads=4),
    ).train()  # fmt: skip
    target = {"boxes": torch.tensor([[8.0, 8, 40, 40]]), "labels": torch.tensor([1]), "masks": torch.ones(1, 64, 64)}
    targets = [target | {"masks": target["masks"].to(torch.uint8)} for _ in range(2)]
    losses = model([torch.rand(3, 64, 64) for _ in range(2)], targets)
    sum(losses.values()).backward()
    (layer,) = model.backbone.fpn.layers
    assert all(projector.norm.bn.weight.grad.abs().sum() > 0 for projector in layer.projectors)


def test_unknown_neck_is_refused():
    with pytest.raises(ValueError, match="neck"):
        saccade.create_detector("resnet10t", "mask_rcnn", neck="bifpn")
