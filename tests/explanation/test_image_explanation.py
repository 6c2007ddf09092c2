"""Explanation of one image."""

import numpy as np
import pytest

import saccade
from saccade.explanation.explain import explain


def test_target_is_an_index_or_a_name(cat):
    labels = [f"thing {i}" for i in range(10)]
    model = saccade.create_model("svit_nano", num_classes=10)
    for target, expected in [(4, "thing 4"), ("thing 6", "thing 6"), ("7", "thing 7"), (-1, "thing 9")]:
        assert explain(cat, model, target=target, labels=labels, importance=())[0].target == expected
    with pytest.raises(ValueError, match="expected a class below 10, got 12"):
        explain(cat, model, target=12)
    with pytest.raises(ValueError, match=r"name or index \(0 to 9\) of a class of this model, got 'tiger'"):
        explain(cat, model, target="tiger")


def test_default_target_is_the_top_prediction(cat):
    image = explain(cat, saccade.create_model("svit_nano", num_classes=10), importance=())[0]
    assert len(image.predictions) == 5
    assert image.target == image.predictions[0][0]
    probabilities = [value for _, value in image.predictions]
    assert probabilities == sorted(probabilities, reverse=True)


def test_model_without_classes_has_no_importance(cat):
    model = saccade.create_model("svit_nano", num_classes=0)
    image = explain(cat, model)[0]
    assert "mosaic" in image.figures
    assert not any(key.startswith("importance/") for key in image.arrays)
    assert image.predictions == []
    assert image.target == ""
    assert image.notes == ["No importance: expected a model with classes, got num_classes=0."]
    with pytest.raises(ValueError, match="expected a model with classes"):
        explain(cat, model, target=3)


def test_large_maps_are_not_stored(cat, monkeypatch):
    monkeypatch.setattr("saccade.explanation.image_explanation.MAX_ARRAY", 200)
    image = explain(cat, "svit_nano", importance=())[0]
    assert not any(key.startswith("maps/") for key in image.arrays)
    assert image.notes == [
        "Maps too large for arrays: stages.0.blocks.0, stages.1.blocks.0, stages.1.blocks.1. "
        "Use saccade.record for the traces."
    ]


def test_one_pixel_image_and_one_channel_model():
    pixel = np.full((1, 1, 3), 77, np.uint8)
    image = explain(pixel, saccade.create_model("svit_nano", in_chans=1), importance=())[0]
    assert "mosaic" in image.figures


def test_gallery_is_ranked_by_occlusion(cat):
    image = explain(cat, "svit_nano")[0]
    values = image.arrays["importance/occlusion/stages.1.blocks.1"]
    shown = [int(panel.label.split()[1]) for panel in image.figures["tokens"].panels]
    assert shown == np.argsort(-values, kind="stable")[:12].tolist()
    assert image.figures["tokens"].panels[0].note.splitlines()[1] == f"occlusion {values.max():+.2g}"


@pytest.mark.shows("PACA-46")
def test_clusters_are_taken_from_the_last_stage_with_clusters(cat):
    image = explain(cat, "paca_nano", importance=())[0]
    (key,) = [key for key in image.arrays if key.startswith("clusters/probability/")]
    assert key == f"clusters/probability/{image.steps[-1]['name']}"
    assert image.arrays[key].shape == (image.steps[-1]["tokens"],)


@pytest.mark.shows("PACA-46")
def test_clusters_of_a_chosen_stage(cat):
    image = explain(cat, "paca_nano", importance=(), stage=2)[0]
    (key,) = [key for key in image.arrays if key.startswith("clusters/probability/")]
    assert key == "clusters/probability/stages.1.blocks.0"
    assert len(image.arrays[key]) == 32
    with pytest.raises(ValueError, match="expected a stage with clusters, got 4"):
        explain(cat, "paca_nano", importance=(), stage=4)
    with pytest.raises(ValueError, match="svit_nano has clusters in: none"):
        explain(cat, "svit_nano", importance=(), stage=1)


@pytest.mark.shows("PACA-42")
def test_target_that_is_not_the_prediction_is_noted(cat):
    """PaCa Sec. 3.3 studies images that are classified correctly."""
    predicted = explain(cat, "paca_nano", importance=())[0]
    assert not any("is not the prediction" in note for note in predicted.notes)
    other = explain(cat, "paca_nano", importance=(), target=predicted.predictions[1][0])[0]
    (note,) = [note for note in other.notes if "is not the prediction" in note]
    assert predicted.predictions[0][0] in note
    assert predicted.predictions[1][0] in note
    same = explain(cat, "paca_nano", importance=(), target=predicted.predictions[0][0])[0]
    assert not any("is not the prediction" in note for note in same.notes)
