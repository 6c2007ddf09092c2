"""SViT's figures: borders of super tokens, and the attention of one position."""

import numpy as np
import pytest
import torch

import saccade
from saccade.explanation.drawing.alignment import Alignment
from saccade.explanation.drawing.overlay import border_mask
from saccade.explanation.figures.svit import (
    anchor_cell,
    anchor_figure,
    cell_labels,
    effective_attention,
    super_token_figure,
)
from saccade.explanation.hooks.attention import Attention
from saccade.explanation.observe import observe
from tests.explanation.planted import association, observation, quadrants, step, view

IDENTITY = Alignment((1.0, 1.0), (0.0, 0.0))


@pytest.mark.shows("SVIT-55")
def test_super_token_borders_follow_the_association():
    truth = torch.arange(32)[:, None] // 16 * 2 + torch.arange(32)[None] // 16
    truth[:, 12:16] = truth[:, 16:20]  # the right tokens take four columns of the left cells
    one = step(association(truth, 16), (32, 32), IDENTITY)
    figure = super_token_figure(observation(view(32, 32, 0), one), [one], (0.1, 0.1), "a_model")
    grid, learned = (panel.image for panel in figure.panels)
    assert (learned[3, 11:13] == 255).all()  # the border moved from 15|16 to 11|12
    assert (learned[3, 16] != 255).any()
    assert (grid[28, 15:17] == 255).all()
    assert (grid[28, 11] != 255).any()
    assert figure.panels[0].note == "4 cells"
    assert figure.panels[1].note == "4 super tokens"


def test_super_token_figure_marks_the_anchor_cell_and_its_neighbours():
    truth = torch.arange(60)[:, None] // 12 * 5 + torch.arange(60)[None] // 12
    one = step(association(truth, 12), (60, 60), IDENTITY)
    figure = super_token_figure(observation(view(60, 60, 0), one), [one], (0.5, 0.5), "m")
    drawn = figure.panels[0].image.astype(int)
    green = np.argwhere((drawn == [0, 158, 115]).all(2))
    red = np.argwhere((drawn == [213, 47, 39]).all(2))
    assert (green.min(0).tolist(), green.max(0).tolist()) == ([24, 24], [35, 35])
    assert (red.min(0).tolist(), red.max(0).tolist()) == ([12, 12], [47, 47])


@pytest.mark.parametrize("image_size", [(64, 64), (50, 61)])
def test_cell_labels_are_aligned_with_the_image(image_size):
    """Stride 4, centres on every fourth pixel: the border between cells of 4 lies between pixels 13 and 14."""
    size = -(-image_size[0] // 4), -(-image_size[1] // 4)
    labels = torch.arange(size[0])[:, None] // 4 * -(-size[1] // 4) + torch.arange(size[1])[None] // 4
    one = step(association(labels, 4), image_size, Alignment((4.0, 4.0), (0.0, 0.0)))
    drawn = cell_labels(one, image_size)
    assert np.where(border_mask(drawn)[0])[0][:2].tolist() == [13, 14]
    assert np.where(border_mask(drawn)[:, 0])[0][:2].tolist() == [13, 14]
    assert drawn.max() == one.count - 1


@pytest.mark.shows("SVIT-16", "SVIT-56")
def test_effective_attention_reproduces_the_block_output():
    """Times the pixels' values, the row of Q A Q̂ᵀ is the output of the block's attention at the anchor."""
    torch.manual_seed(0)
    model = saccade.create_model("svit_nano").eval()
    block = model.stages[0].blocks[0].attn
    captured = {}
    block.register_forward_hook(lambda _, inputs, output: captured.update(features=inputs[0], output=output))
    observed = observe(model, view(64, 64), (0.5,) * 3, (0.2,) * 3)
    one, anchor = observed.steps[0], (0.45, 0.55)
    attention = effective_attention(one, anchor)  # (heads, H, W)
    row, column = anchor_cell(one, anchor)
    pixels = captured["features"][0].flatten(1).T  # (N, C)
    heads = block.attention.num_heads
    value = block.attention.qkv(pixels).unflatten(1, (3, heads, -1))[:, 2]  # (N, heads, C / heads)
    mixed = torch.einsum("hn,nhc->hc", attention.flatten(1), value).flatten()
    expected = block.attention.proj(mixed)
    torch.testing.assert_close(captured["output"][0, :, row, column], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(attention.sum((1, 2)), torch.ones(heads))


@pytest.mark.shows("SVIT-56")
def test_anchor_figure_marks_the_attended_cell():
    """Four cells of 4 x 4; token 0 attends to token 3 alone: from the first cell, the last one is red."""
    labels = torch.arange(8)[:, None] // 4 * 2 + torch.arange(8)[None] // 4
    weights = torch.eye(4)[[3, 1, 2, 0]][None, None]
    one = step(association(labels, 4), (8, 8), IDENTITY, Attention(weights, "stages.0.blocks.0", 1))
    attention = effective_attention(one, (0.2, 0.2))[0]
    assert attention[4:, 4:].min() == pytest.approx(1 / 16)
    assert attention.sum() == pytest.approx(1)
    figure = anchor_figure(observation(view(8, 8, 100), one), [one], (0.2, 0.2), "a_model")
    drawn = figure.panels[0].image.astype(int)
    assert drawn[6, 6, 0] - drawn[6, 6, 1] > 100
    assert drawn[6, 1, 0] == drawn[6, 1, 1]
    assert figure.panels[0].note == "25% of the image above half the maximum"


def test_anchor_figure_draws_at_most_three_heads():
    labels = torch.arange(8)[:, None] // 4 * 2 + torch.arange(8)[None] // 4
    weights = torch.eye(4).expand(1, 5, 4, 4)
    one = step(association(labels, 4), (8, 8), IDENTITY, Attention(weights, "stages.0.blocks.0", 1))
    figure = anchor_figure(observation(view(8, 8, 100), one), [one], (0.2, 0.2), "a_model")
    assert [panel.label for panel in figure.panels] == [f"stage 1, block 1, head {i}" for i in (1, 2, 3)]


def test_anchor_figure_without_attention_is_none():
    labels = torch.arange(8)[:, None] // 4 * 2 + torch.arange(8)[None] // 4
    one = step(association(labels, 4), (8, 8), IDENTITY)
    assert anchor_figure(observation(view(8, 8), one), [one], (0.5, 0.5), "m") is None
    with pytest.raises(ValueError, match="expected a step with attention among super tokens, got block 1"):
        effective_attention(step(quadrants(), (8, 8)), (0.5, 0.5))


def test_anchor_cell_is_the_nearest_cell():
    labels = torch.arange(16)[:, None] // 4 * 4 + torch.arange(16)[None] // 4
    one = step(association(labels, 4), (64, 64), Alignment((4.0, 4.0), (0.0, 0.0)))
    assert anchor_cell(one, (0.0, 0.0)) == (0, 0)
    assert anchor_cell(one, (1.0, 1.0)) == (15, 15)
    assert anchor_cell(one, (40.5 / 64, 8.5 / 64)) == (2, 10)
