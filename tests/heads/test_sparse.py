"""SparseFormer's dense head against the formula of appendix A.2."""

import math

import pytest
import torch
from torch import nn

from saccade.heads.sparse import SparseHead
from tests.heads.test_fpn import conv_norm_relu, randomise_norms


def random_tokens(count: int = 5):
    rng = torch.Generator().manual_seed(0)
    centre = torch.rand(2, count, 2, generator=rng)
    size = 0.2 + 0.5 * torch.rand(2, count, 2, generator=rng)
    regions = torch.cat([centre - size / 2, centre + size / 2], -1)
    return torch.randn(2, count, 8, generator=rng), regions, torch.randn(2, 6, 4, 7, generator=rng)


@pytest.mark.shows("SF-71", "SF-72", "SF-73")
def test_head_is_the_formula_of_appendix_a2():
    """Softmax(Q Kᵀ / √d + B) V with B = -((x - x_j) / w_j)² - ((y - y_j) / h_j)², two 3x3 convolutions, classifier."""
    torch.manual_seed(0)
    head = SparseHead(6, 8, 3, dim=5).eval()
    randomise_norms(head)
    for layer in (head.locate.to_query, head.locate.to_key, head.locate.to_value):
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    tokens, regions, features = random_tokens()
    with torch.no_grad():
        query = head.locate.to_query(features.flatten(2).transpose(1, 2))
        key, value = head.locate.to_key(tokens), head.locate.to_value(tokens)
        restored = torch.zeros(2, 8, 4, 7)
        for b in range(2):
            for row in range(4):
                for column in range(7):
                    x, y = (column + 0.5) / 7, (row + 0.5) / 4
                    scores = []
                    for j, (x0, y0, x1, y1) in enumerate(regions[b].tolist()):
                        bias = -(((x - (x0 + x1) / 2) / (x1 - x0)) ** 2) - ((y - (y0 + y1) / 2) / (y1 - y0)) ** 2
                        scores.append(float(query[b, row * 7 + column] @ key[b, j]) / math.sqrt(8) + bias)
                    restored[b, :, row, column] = torch.tensor(scores).softmax(0) @ value[b]
        expected = head.classifier.fc(conv_norm_relu(head.conv2, conv_norm_relu(head.conv1, restored)))
        logits, auxiliary = head((tokens, regions, features))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert auxiliary is None


def test_widths_are_those_of_table_8():
    head = SparseHead(96, 512, 150)
    assert head.conv1.conv.weight.shape == (256, 512, 3, 3)
    assert head.conv2.conv.weight.shape == (256, 256, 3, 3)
    assert head.classifier.drop.p == 0.1
