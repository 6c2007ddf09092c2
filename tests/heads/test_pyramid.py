"""Feature pyramid of detectors."""

import torch
import torch.nn.functional as F
from torch import nn

from saccade.heads.pyramid import Pyramid
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
