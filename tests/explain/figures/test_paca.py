"""PaCa's section 3.3 and VT's figures on planted assignments."""

import numpy as np
import pytest
import torch
from torch import nn

from saccade.explain.figures.paca import classify_clusters, cluster_figure, heat_maps, masks_of
from saccade.explain.figures.vt import assignment_maps
from tests.explain.planted import quadrants, seen, step, view


def scored(side: int = 4):
    """Quadrant tokens with scores: high in the own quadrant, low elsewhere."""
    trace = quadrants(side)
    return trace._replace(scores=torch.where(trace.assignment > 0, 2.0, -2.0))


class TopLeft(nn.Module):
    """Class 1 if the top left quarter is bright, else class 0."""

    def forward(self, images):
        bright = images[:, :, : images.shape[2] // 2, : images.shape[3] // 2].mean((1, 2, 3))
        return torch.stack([torch.full_like(bright, 0.3), bright], 1) * 8


def test_heat_is_the_sigmoid_and_the_mask_is_above_its_mean():
    heat = heat_maps(scored())
    assert heat[0, 0, 0] == pytest.approx(1 / (1 + np.exp(-2)))
    assert heat[0, 3, 3] == pytest.approx(1 / (1 + np.exp(2)))
    masks = masks_of(heat, (32, 32))
    assert masks[0, :16, :16].all()
    assert masks[0].sum() == 16 * 16
    assert masks.sum(0).eq(1).all()


def test_masks_are_enlarged_by_nearest_neighbour():
    heat = torch.rand(3, 5, 7)
    masks = masks_of(heat, (23, 31))
    rows, columns = np.arange(23) * 5 // 23, np.arange(31) * 7 // 31
    small = (heat > heat.mean((1, 2), keepdim=True)).numpy()
    assert (masks.numpy() == small[:, rows][:, :, columns]).all()


def test_the_group_is_positive_that_keeps_the_answer():
    model, picture = TopLeft(), torch.ones(3, 32, 32)
    clusters = classify_clusters(model, step(scored(), (32, 32)), picture, lambda images: images, label=1, batch=3)
    assert clusters.positive.tolist() == [True, False, False, False]
    assert clusters.ranked(True).tolist() == [0]
    assert clusters.ranked(False).tolist() == [1, 2, 3]
    assert clusters.probability[0] == pytest.approx(clusters.whole) == pytest.approx(1 / (1 + np.exp(-5.6)))
    assert clusters.probability[1] == pytest.approx(1 / (1 + np.exp(2.4)))


def test_the_figure_shows_what_is_left_of_the_picture():
    planted = view(32, 32)
    one = step(scored(), (32, 32))
    clusters = classify_clusters(TopLeft(), one, torch.ones(3, 32, 32), lambda images: images, label=1)
    figure = cluster_figure(seen(planted, one), one, clusters, "cat", "a_model", top=2)
    assert [panel.label for panel in figure.panels] == ["planted", "token 0", "token 1", "token 2"]
    assert figure.panels[1].note.startswith("positive")
    assert (figure.panels[1].picture[:16, :16] == planted.picture[:16, :16]).all()
    assert figure.panels[1].picture[16:].sum() == 0
    assert "1 positive, 3 negative" in figure.caption
    assert len(cluster_figure(seen(planted, one), one, clusters, "cat", "a_model", top=None).panels) == 5


def test_ranks_go_by_probability():
    from saccade.explain.figures.paca import Clusters

    clusters = Clusters(
        torch.zeros(4, 2, 2),
        torch.zeros(4, 4, 4),
        torch.tensor([0.1, 0.9, 0.4, 0.6]),
        torch.tensor([False, True, False, True]),
        0.5,
    )
    assert clusters.ranked(True).tolist() == [1, 3]
    assert clusters.ranked(False).tolist() == [2, 0]


def test_without_scores_it_says_so():
    with pytest.raises(ValueError, match="reports no scores before the softmax"):
        heat_maps(quadrants())


def test_vt_maps_are_red_where_the_token_reads_and_blue_elsewhere():
    one = step(quadrants(4), (32, 32))
    figure = assignment_maps(seen(view(32, 32, 128), one), one, "a_model")
    assert len(figure.panels) == 4
    for token, panel in enumerate(figure.panels):
        drawn = panel.picture.astype(int)
        row, column = 4 + 24 * (token // 2), 4 + 24 * (token % 2)
        assert drawn[row, column, 0] > drawn[row, column, 2] + 60  # red
        assert drawn[31 - row, 31 - column, 2] > drawn[31 - row, 31 - column, 0] + 40  # blue
    assert "a_model, block 1, all 4 tokens" in figure.caption
    some = assignment_maps(seen(view(32, 32), one), one, "a_model", np.array([2, 0]))
    assert [panel.label for panel in some.panels] == ["token 2", "token 0"]
    assert "2 of 4 tokens" in some.caption
