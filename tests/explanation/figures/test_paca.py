"""PaCa Sec. 3.3 on planted assignments."""

import numpy as np
import pytest
import torch
from torch import nn

from saccade.explanation.figures.paca import Clusters, classify_clusters, cluster_figure, heat_maps, threshold_masks
from tests.explanation.planted import observation, quadrants, step, view


def scored(side: int = 4):
    """Quadrant tokens with scores: 2 in the own quadrant, -2 elsewhere."""
    trace = quadrants(side)
    return trace._replace(scores=torch.where(trace.assignment > 0, 2.0, -2.0))


class TopLeft(nn.Module):
    """Class 1 if the top left quarter is bright, else class 0."""

    def forward(self, images):
        brightness = images[:, :, : images.shape[2] // 2, : images.shape[3] // 2].mean((1, 2, 3))
        return torch.stack([torch.full_like(brightness, 0.3), brightness], 1) * 8


@pytest.mark.shows("PACA-40", "PACA-41")
def test_heat_is_the_sigmoid_and_the_mask_is_above_its_mean():
    heat = heat_maps(scored())
    assert heat[0, 0, 0] == pytest.approx(1 / (1 + np.exp(-2)))
    assert heat[0, 3, 3] == pytest.approx(1 / (1 + np.exp(2)))
    masks = threshold_masks(heat, (32, 32))
    assert masks[0, :16, :16].all()
    assert masks[0].sum() == 16 * 16
    assert masks.sum(0).eq(1).all()


@pytest.mark.shows("PACA-41")
def test_masks_are_enlarged_by_nearest_neighbour():
    heat = torch.rand(3, 5, 7)
    masks = threshold_masks(heat, (23, 31))
    rows, columns = np.arange(23) * 5 // 23, np.arange(31) * 7 // 31
    small = (heat > heat.mean((1, 2), keepdim=True)).numpy()
    assert (masks.numpy() == small[:, rows][:, :, columns]).all()


@pytest.mark.shows("PACA-42", "PACA-43")
def test_positive_clusters_keep_the_class():
    model, image = TopLeft(), torch.ones(3, 32, 32)
    clusters = classify_clusters(
        model, step(scored(), (32, 32)), image, lambda images: images, class_index=1, batch_size=3
    )
    assert clusters.positive.tolist() == [True, False, False, False]
    assert clusters.ranked(True).tolist() == [0]
    assert clusters.ranked(False).tolist() == [1, 2, 3]
    assert clusters.probability[0] == pytest.approx(clusters.unmasked) == pytest.approx(1 / (1 + np.exp(-5.6)))
    assert clusters.probability[1] == pytest.approx(1 / (1 + np.exp(2.4)))


def test_masked_pixels_are_black_before_normalisation():
    inputs = []

    def prepare(images):
        inputs.append(images)
        return images + 5

    classify_clusters(TopLeft(), step(scored(), (32, 32)), torch.ones(3, 32, 32), prepare, class_index=1)
    assert inputs[0][0, :, :16, :16].min() == 1
    assert inputs[0][0, :, 16:].abs().max() == 0


@pytest.mark.shows("PACA-43")
def test_cluster_figure_shows_the_masked_images():
    planted = view(32, 32)
    one = step(scored(), (32, 32))
    clusters = classify_clusters(TopLeft(), one, torch.ones(3, 32, 32), lambda images: images, class_index=1)
    figure = cluster_figure(observation(planted, one), one, clusters, "cat", "a_model", top=2)
    assert [panel.label for panel in figure.panels] == ["planted", "token 0", "token 1", "token 2"]
    assert [panel.note.partition(":")[0] for panel in figure.panels] == ["unmasked", "positive", "negative", "negative"]
    assert (figure.panels[1].image[:16, :16] == planted.canvas[:16, :16]).all()
    assert figure.panels[1].image[16:].sum() == 0
    assert "1 positive, 3 negative" in figure.caption
    assert len(cluster_figure(observation(planted, one), one, clusters, "cat", "a_model", top=None).panels) == 5


@pytest.mark.shows("PACA-43")
def test_clusters_are_ranked_by_probability_within_their_group():
    clusters = Clusters(
        torch.zeros(4, 2, 2),
        torch.zeros(4, 4, 4),
        torch.tensor([0.1, 0.9, 0.4, 0.6]),
        torch.tensor([False, True, False, True]),
        0.5,
    )
    assert clusters.ranked(True).tolist() == [1, 3]
    assert clusters.ranked(False).tolist() == [2, 0]


def test_heat_needs_scores():
    with pytest.raises(ValueError, match="expected scores before the softmax"):
        heat_maps(quadrants())
