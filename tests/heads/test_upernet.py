"""UperNet against its definition, written out layer by layer."""

import pytest
import torch
import torch.nn.functional as F

from saccade.heads.upernet import FCNHead, PyramidPooling, UperNetHead
from tests.heads.test_fpn import conv_norm_relu, make_pyramid, randomise_norms

CHANNELS = [4, 8, 12, 16]


def upsample(features, size):
    return F.interpolate(features, size, mode="bilinear", align_corners=False)


def pooled(module, features):
    """Averages over parts x parts cells, cell by cell as adaptive pooling defines them."""
    height, width = features.shape[2:]
    outputs = [features]
    for parts, level in zip((1, 2, 3, 6), module.levels, strict=True):
        rows = [(i * height // parts, -(-(i + 1) * height // parts)) for i in range(parts)]
        columns = [(i * width // parts, -(-(i + 1) * width // parts)) for i in range(parts)]
        cells = torch.stack([
            torch.stack([features[:, :, a:b, c:d].mean((2, 3)) for c, d in columns], -1) for a, b in rows
        ], -2)  # fmt: skip
        outputs.append(upsample(conv_norm_relu(level, cells), (height, width)))
    return conv_norm_relu(module.fuse, torch.cat(outputs, 1))


@pytest.mark.shows("PACA-54")
def test_pooling_averages_over_1_2_3_and_6_cells():
    torch.manual_seed(0)
    module = PyramidPooling(5, 4).eval()
    randomise_norms(module)
    features = torch.randn(2, 5, 7, 9)
    with torch.no_grad():
        torch.testing.assert_close(module(features), pooled(module, features))


@pytest.mark.shows("PACA-54")
def test_head_adds_top_down_and_fuses_all_levels():
    torch.manual_seed(0)
    head, pyramid = UperNetHead(CHANNELS, 3, dim=6, auxiliary_dim=5).eval(), make_pyramid(CHANNELS)
    randomise_norms(head)
    with torch.no_grad():
        sums = [conv_norm_relu(block, features) for block, features in zip(head.lateral, pyramid[:3], strict=True)]
        sums.append(pooled(head.pooling, pyramid[3]))
        for level in (2, 1, 0):
            sums[level] = sums[level] + upsample(sums[level + 1], sums[level].shape[2:])
        smooth = [conv_norm_relu(block, features) for block, features in zip(head.smooth, sums[:3], strict=True)]
        levels = [upsample(features, (12, 20)) for features in (*smooth, sums[3])]
        expected = head.classifier.fc(conv_norm_relu(head.fuse, torch.cat(levels, 1)))
        logits, auxiliary = head(pyramid)
    torch.testing.assert_close(logits, expected)
    assert auxiliary is None


def test_auxiliary_head_reads_the_second_coarsest_level_in_training():
    torch.manual_seed(0)
    head, pyramid = UperNetHead(CHANNELS, 3, dim=6, auxiliary_dim=5, dropout=0.0).train(), make_pyramid(CHANNELS)
    _, auxiliary = head(pyramid)
    assert isinstance(head.auxiliary, FCNHead)
    expected = head.auxiliary.classifier.fc(conv_norm_relu(head.auxiliary.conv, pyramid[2]))
    torch.testing.assert_close(auxiliary, expected)


def test_default_widths_are_mmsegmentations():
    head = UperNetHead(CHANNELS, 150)
    assert head.pooling.parts == [1, 2, 3, 6]
    assert head.fuse.conv.weight.shape == (512, 4 * 512, 3, 3)
    assert head.auxiliary.conv.conv.weight.shape == (256, 12, 3, 3)
    assert head.classifier.drop.p == head.auxiliary.classifier.drop.p == 0.1


def test_auxiliary_dim_zero_omits_the_auxiliary_head():
    head = UperNetHead(CHANNELS, 3, dim=6, auxiliary_dim=0).train()
    assert head.auxiliary is None
    assert head(make_pyramid(CHANNELS))[1] is None


def test_training_with_one_image_is_refused():
    head = UperNetHead(CHANNELS, 3, dim=6)
    with pytest.raises(ValueError, match="expected a batch of at least 2 in training, got 1"):
        head([features[:1] for features in make_pyramid(CHANNELS)])
    head.eval()([features[:1] for features in make_pyramid(CHANNELS)])
