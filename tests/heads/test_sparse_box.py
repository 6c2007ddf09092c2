"""SparseFormer's detection head (appendix A.1)."""

import pytest
import torch
from torch import nn

from saccade.heads.sparse_box import SparseBoxHead


def random_tokens(count: int = 7, dtype: torch.dtype = torch.float32):
    rng = torch.Generator().manual_seed(0)
    centre, size = torch.rand(2, count, 2, generator=rng), 0.1 + torch.rand(2, count, 2, generator=rng)
    return torch.randn(2, count, 8, generator=rng).to(dtype), torch.cat([centre - size / 2, centre + size / 2], -1)


@pytest.mark.shows("SF-68")
def test_boxes_start_as_the_regions():
    tokens, regions = random_tokens()
    logits, boxes = SparseBoxHead(8, 3, count=4)(tokens, regions)
    assert logits.shape == (2, 4, 4)
    torch.testing.assert_close(boxes, regions[:, :4])


@pytest.mark.shows("SF-68")
def test_head_is_linear_classifier_and_two_layer_refinement():
    """Deltas shift the centre by a fraction of the size and scale the size exponentially."""
    torch.manual_seed(0)
    head, (tokens, regions) = SparseBoxHead(8, 3, count=4), random_tokens()
    nn.init.normal_(head.to_delta[2].weight, std=0.3)
    nn.init.normal_(head.to_delta[2].bias, std=0.3)
    with torch.no_grad():
        logits, boxes = head(tokens, regions)
        normed = head.norm(tokens[:, :4])
        torch.testing.assert_close(logits, normed @ head.to_class.weight.T + head.to_class.bias)
        hidden = (normed @ head.to_delta[0].weight.T + head.to_delta[0].bias).relu()
        dx, dy, dw, dh = (hidden @ head.to_delta[2].weight.T + head.to_delta[2].bias).unbind(-1)
        x0, y0, x1, y1 = regions[:, :4].unbind(-1)
        x, y = (x0 + x1) / 2 + dx * (x1 - x0), (y0 + y1) / 2 + dy * (y1 - y0)
        w, h = (x1 - x0) * dw.exp(), (y1 - y0) * dh.exp()
    torch.testing.assert_close(boxes, torch.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], -1))


def test_only_the_first_tokens_detect():
    head, (tokens, regions) = SparseBoxHead(8, 3, count=4), random_tokens()
    before = head(tokens, regions)
    tokens[:, 4:], regions[:, 4:] = 9.0, 0.5
    for expected, output in zip(before, head(tokens, regions), strict=True):
        torch.testing.assert_close(output, expected)


def test_outputs_are_float32_in_bfloat16():
    tokens, regions = random_tokens(dtype=torch.bfloat16)
    logits, boxes = SparseBoxHead(8, 3, count=4).bfloat16()(tokens, regions)
    assert logits.dtype == boxes.dtype == torch.float32
