"""Semantic FPN against its definition, written out layer by layer."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from saccade.heads.fpn import FPN, FPNHead, SemanticBranch

SIZES = ((12, 20), (6, 10), (3, 5), (2, 3))


def make_pyramid(channels, sizes=SIZES):
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(2, c, *size, generator=rng) for c, size in zip(channels, sizes, strict=True)]


def conv_norm_relu(block, features):
    convolved = F.conv2d(features, block.conv.weight, padding=block.conv.kernel_size[0] // 2)
    return block.norm(convolved).relu()


def randomise_norms(module):
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.running_mean, std=0.1)
            nn.init.uniform_(norm.running_var, 0.5, 2)


@pytest.mark.shows("VT-62")
def test_fpn_sums_lateral_maps_top_down():
    torch.manual_seed(0)
    neck, pyramid = FPN([4, 8, 12, 16], 6), make_pyramid([4, 8, 12, 16])
    with torch.no_grad():
        outputs, total = neck(pyramid), None
        assert len(outputs) == 4
        for level in (3, 2, 1, 0):
            lateral = neck.fpn.inner_blocks[level](pyramid[level])
            total = lateral if total is None else lateral + F.interpolate(total, lateral.shape[2:], mode="nearest")
            torch.testing.assert_close(outputs[level], neck.fpn.layer_blocks[level](total))


@pytest.mark.shows("VT-63")
def test_branch_upsamples_level_by_level_and_sums():
    torch.manual_seed(0)
    branch, pyramid = SemanticBranch(4, 6, 5).eval(), make_pyramid([6] * 4)
    randomise_norms(branch)
    assert [len(blocks) for blocks in branch.levels] == [1, 1, 2, 3]
    with torch.no_grad():
        expected = conv_norm_relu(branch.levels[0][0], pyramid[0])
        for level in (1, 2, 3):
            features = pyramid[level]
            for step, block in enumerate(branch.levels[level]):
                size = SIZES[level - 1 - step]
                features = conv_norm_relu(block, features)
                features = F.interpolate(features, size, mode="bilinear", align_corners=False)
            expected = expected + features
        torch.testing.assert_close(branch(pyramid), expected)


def test_head_is_neck_branch_classifier():
    torch.manual_seed(0)
    head, pyramid = FPNHead([4, 8, 12, 16], 3, dim=6, branch_dim=5).eval(), make_pyramid([4, 8, 12, 16])
    with torch.no_grad():
        logits, auxiliary = head(pyramid)
        torch.testing.assert_close(logits, head.classifier(head.branch(head.neck(pyramid))))
    assert logits.shape == (2, 3, 12, 20)
    assert auxiliary is None
    assert isinstance(head.neck, FPN)
    assert head.classifier.drop.p == 0.0


def test_groups_select_group_norm():
    for groups, expected in ((0, nn.BatchNorm2d), (4, nn.GroupNorm)):
        head = FPNHead([4, 4], 3, dim=8, branch_dim=8, groups=groups)
        norms = [type(m) for m in head.modules() if isinstance(m, (nn.BatchNorm2d, nn.GroupNorm))]
        assert norms == [expected] * 2


def test_another_neck_replaces_the_fpn():
    neck = nn.Identity()
    assert FPNHead([8, 8], 3, neck=neck, dim=8).neck is neck
