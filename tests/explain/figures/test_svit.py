"""SViT's figures: borders where tokens change, and the attention of one place."""

import numpy as np
import pytest
import torch

import saccade
from saccade.explain.drawing.alignment import Place
from saccade.explain.drawing.overlay import border_mask
from saccade.explain.figures.svit import (
    anchor_cell,
    anchor_figure,
    cell_labels,
    effective_attention,
    super_token_figure,
)
from saccade.explain.hooks.attention import Attention
from saccade.explain.observe import observe
from tests.explain.planted import association, seen, step, view

SAME = Place((1.0, 1.0), (0.0, 0.0))


def test_the_grid_and_the_learned_borders_are_drawn_where_they_are():
    truth = torch.arange(32)[:, None] // 16 * 2 + torch.arange(32)[None] // 16
    truth[:, 12:16] = truth[:, 16:20]  # the right tokens take four columns of the left cells
    one = step(association(truth, 16), (32, 32), SAME)
    figure = super_token_figure(seen(view(32, 32, 0), one), [one], (0.1, 0.1), "a_model")
    grid, learned = (panel.picture for panel in figure.panels)
    assert (learned[3, 11:13] == 255).all()  # the line moved from 15|16 to 11|12
    assert (learned[3, 16] != 255).any()
    assert (grid[28, 15:17] == 255).all()
    assert (grid[28, 11] != 255).any()
    assert figure.panels[0].note == "4 cells"
    assert figure.panels[1].note == "4 super tokens"


def test_the_green_cell_and_its_nine_neighbours_are_marked():
    truth = torch.arange(60)[:, None] // 12 * 5 + torch.arange(60)[None] // 12
    one = step(association(truth, 12), (60, 60), SAME)
    drawn = super_token_figure(seen(view(60, 60, 0), one), [one], (0.5, 0.5), "m").panels[0].picture.astype(int)
    green = np.argwhere((drawn == [0, 158, 115]).all(2))
    red = np.argwhere((drawn == [213, 47, 39]).all(2))
    assert (green.min(0).tolist(), green.max(0).tolist()) == ([24, 24], [35, 35])
    assert (red.min(0).tolist(), red.max(0).tolist()) == ([12, 12], [47, 47])


@pytest.mark.parametrize("image", [(64, 64), (50, 61)])
def test_cells_of_a_real_map_are_drawn_at_their_places(image):
    """Stride 4, centres on every fourth pixel: the line between cells of 4 lies between pixels 13 and 14."""
    size = -(-image[0] // 4), -(-image[1] // 4)
    labels = torch.arange(size[0])[:, None] // 4 * -(-size[1] // 4) + torch.arange(size[1])[None] // 4
    one = step(association(labels, 4), image, Place((4.0, 4.0), (0.0, 0.0)))
    drawn = cell_labels(one, image)
    assert np.where(border_mask(drawn)[0])[0][:2].tolist() == [13, 14]
    assert drawn.max() == one.count - 1


def test_effective_attention_is_what_the_block_computes():
    """Through association, attention and back: times the pixels' values it is the block's own output."""
    torch.manual_seed(0)
    model = saccade.create_model("svit_nano").eval()
    block = model.stages[0].blocks[0].attn
    heard = {}
    block.register_forward_hook(lambda _, inputs, output: heard.update(features=inputs[0], output=output))
    found = observe(model, view(64, 64), (0.5,) * 3, (0.2,) * 3)
    one, anchor = found.steps[0], (0.45, 0.55)
    rows = effective_attention(one, anchor)  # (heads, H, W)
    row, column = anchor_cell(one, anchor)
    pixels = heard["features"][0].flatten(1).T  # (N, C)
    heads = block.attention.num_heads
    value = block.attention.qkv(pixels).unflatten(1, (3, heads, -1))[:, 2]  # (N, heads, C / heads)
    mixed = torch.einsum("hn,nhc->hc", rows.flatten(1), value).flatten()
    expected = block.attention.proj(mixed)
    torch.testing.assert_close(heard["output"][0, :, row, column], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rows.sum((1, 2)), torch.ones(heads))


def test_an_anchor_attends_to_the_cell_its_token_attends_to():
    """Four cells of 4 x 4; token 0 attends to token 3 alone: from the first cell, the last one turns red."""
    labels = torch.arange(8)[:, None] // 4 * 2 + torch.arange(8)[None] // 4
    weights = torch.eye(4)[[3, 1, 2, 0]][None, None]
    one = step(association(labels, 4), (8, 8), SAME, Attention(weights, "stages.0.blocks.0", 1))
    row = effective_attention(one, (0.2, 0.2))[0]
    assert row[4:, 4:].min() == pytest.approx(1 / 16)
    assert row.sum() == pytest.approx(1)
    figure = anchor_figure(seen(view(8, 8, 100), one), [one], (0.2, 0.2), "a_model")
    drawn = figure.panels[0].picture.astype(int)
    assert drawn[6, 6, 0] - drawn[6, 6, 1] > 100
    assert drawn[6, 1, 0] == drawn[6, 1, 1]
    assert "25% of the image" in figure.panels[0].note


def test_the_anchor_lies_in_the_cell_nearest_to_it():
    labels = torch.arange(16)[:, None] // 4 * 4 + torch.arange(16)[None] // 4
    one = step(association(labels, 4), (64, 64), Place((4.0, 4.0), (0.0, 0.0)))
    assert anchor_cell(one, (0.0, 0.0)) == (0, 0)
    assert anchor_cell(one, (1.0, 1.0)) == (15, 15)
    assert anchor_cell(one, (40.5 / 64, 8.5 / 64)) == (2, 10)
