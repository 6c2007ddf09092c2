"""Predictions, maps and importance on the page agree with the model."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from saccade.explanation.inspection import (
    MARK,
    default_token,
    get_stage,
    inspect_image,
    mosaic_image,
    summarize,
    summarize_token,
    summary_sheet,
    token_at,
    token_image,
)
from saccade.explanation.scores.importance import occlusion_importance
from saccade.explanation.subject import load_subject
from saccade.reports.page import part
from saccade.web.catalogue import ModelEntry

NANO = ("svit_nano", "paca_nano", "sparseformer_nano", "vt_nano")


@pytest.fixture(scope="module")
def inspections():
    from saccade.data.synthetic.photos import photo_paths

    image = Image.open(photo_paths()["cat"]).resize((96, 64))
    return {name: inspect_image(load_subject(name), image, "cat.jpg") for name in NANO}


@pytest.mark.parametrize("name", NANO)
def test_predictions_are_those_of_the_model(inspections, name):
    inspection = inspections[name]
    with torch.no_grad():
        probabilities = inspection.subject.model.eval()(inspection.inputs).softmax(1)[0]
    best = probabilities.topk(5)
    assert [label for label, _ in inspection.predictions] == [inspection.subject.label(int(i)) for i in best.indices]
    np.testing.assert_allclose([probability for _, probability in inspection.predictions], best.values, rtol=1e-4)
    summary = summarize(inspection)
    assert summary["input_size"] == list(inspection.inputs.shape[:1:-1])
    assert [len(stage["importance"]) for stage in summary["stages"]] == [
        stage.step.count for stage in inspection.stages
    ]
    assert summary["tokens"] < summary["pixels"] or name == "sparseformer_nano"


@pytest.mark.parametrize("name", NANO)
def test_token_at_returns_the_strongest_token(inspections, name):
    inspection = inspections[name]
    size = inspection.image.shape[:2]
    for stage in (1, len(inspection.stages)):
        maps = get_stage(inspection, stage).step.maps(size)
        for x, y in ((0.1, 0.2), (0.5, 0.5), (0.9, 0.7)):
            weights = maps[:, int(y * size[0]), int(x * size[1])]
            if weights.max() > 0:
                assert weights[token_at(inspection, stage, x, y)] == weights.max()
    assert 0 <= token_at(inspection, 1, -3, 7) < inspection.stages[0].step.count  # outside: clamped


def test_token_at_returns_the_nearest_token_where_none_has_weight(inspections):
    inspection = inspections["vt_nano"]
    stage = get_stage(inspection, 1)
    labels = np.full(stage.size, -1, np.int16)
    labels[10, 20] = 3
    stage.__dict__["strongest_tokens"] = (labels, stage.strongest_tokens[1])
    try:
        assert token_at(inspection, 1, 0.9, 0.9) == 3
        labels[10, 20] = -1
        assert token_at(inspection, 1, 0.9, 0.9) == 0
    finally:
        del stage.__dict__["strongest_tokens"]


@pytest.mark.parametrize("name", NANO)
def test_token_summary_matches_gradient_and_occlusion(inspections, name):
    inspection = inspections[name]
    last = len(inspection.stages)
    stage, token = inspection.stages[-1], default_token(inspection, last)
    summary, step = summarize_token(inspection, last, token), stage.step
    assert summary["rank"] == 1
    assert summary["gradient"] == pytest.approx(stage.importance.max(), abs=1e-5)
    drops = occlusion_importance(inspection.subject.model, inspection.inputs, inspection.score, step.index, step.count)
    assert summary["drop"] == pytest.approx(float(drops[token]), abs=2e-5)
    assert summary["area"] == pytest.approx((stage.labels == token).mean(), abs=1e-4)
    drawn = [token_image(inspection, last, n) for n in range(min(3, step.count))]
    if name != "vt_nano":  # untrained filters have nearly uniform maps
        assert not np.array_equal(drawn[0], drawn[1])
    assert drawn[0].shape == inspection.image.shape


def test_opacity_blends_image_and_mosaic(inspections):
    inspection = inspections["svit_nano"]
    np.testing.assert_array_equal(mosaic_image(inspection, 1, 0), inspection.image)
    full, half = mosaic_image(inspection, 1, 1), mosaic_image(inspection, 1, 0.5)
    middle = (full.astype(float) + inspection.image) / 2
    assert np.abs(half - middle).max() <= 1
    np.testing.assert_array_equal(mosaic_image(inspection, 1, 7), full)
    np.testing.assert_array_equal(token_image(inspection, 1, 0, 0), inspection.image)


def test_stage_and_token_are_clamped(inspections):
    inspection = inspections["paca_nano"]
    assert get_stage(inspection, 99) is inspection.stages[-1]
    assert get_stage(inspection, -1) is inspection.stages[0]
    assert summarize_token(inspection, 1, 9999)["token"] == inspection.stages[0].step.count - 1


def test_summary_sheet_is_drawn(inspections):
    inspection = inspections["svit_nano"]
    drawn = np.array(summary_sheet(inspection, 1, 0))
    assert drawn.shape[1] > 1300
    assert drawn.std() > 20


def test_inspection_does_not_change_the_model(inspections):
    subject = inspections["svit_nano"].subject
    before = {key: value.clone() for key, value in subject.model.state_dict().items()}
    hooks = [list(module._forward_hooks) for module in subject.model.modules()]
    subject.model.train()
    inspect_image(subject, Image.new("RGB", (64, 64), "teal"))
    assert subject.model.training
    subject.model.eval()
    assert all(torch.equal(value, before[key]) for key, value in subject.model.state_dict().items())
    assert not any(p.grad is not None for p in subject.model.parameters())
    assert [list(module._forward_hooks) for module in subject.model.modules()] == hooks


def test_chosen_token_is_outlined_on_the_mosaic(inspections):
    inspection = inspections["svit_nano"]
    plain, marked = mosaic_image(inspection, 1), mosaic_image(inspection, 1, token=5)
    labels = get_stage(inspection, 1).labels
    changed = (plain != marked).any(-1)
    outline = (marked == MARK).all(-1)
    assert outline.any()
    assert outline.sum() < changed.sum()
    inside = labels == 5
    eroded = inside.copy()
    for axis in (0, 1):
        for step in (-1, 1):
            eroded &= np.roll(inside, 5 * step, axis)
    assert not changed[eroded].any()  # only near its border


def test_doubt_is_decided_by_the_largest_probability(inspections):
    inspection = inspections["svit_nano"]
    assert inspection.doubt == ""  # untrained: the page says so instead
    subject = inspection.subject._replace(trained=True)
    classes = inspection.subject.model.num_classes
    limit = 1 / classes + 0.2 * (1 - 1 / classes)
    low = replace(inspection, subject=subject, predictions=[("cat", limit - 0.01)])
    assert low.doubt.startswith(f"Uncertain: the most probable class has {limit - 0.01:.0%}, below {limit:.0%}.")
    assert f"none of the {classes} classes" in low.doubt
    assert summarize(low)["doubt"] == low.doubt
    assert replace(low, predictions=[("cat", limit)]).doubt == ""


def test_parts_escape_external_text(inspections):
    hostile = inspections["svit_nano"].subject._replace(labels=["<script>alert(1)</script>"] * 1000)
    changed = inspect_image(hostile, Image.new("RGB", (64, 64)), "<img src=x>")
    entry = ModelEntry("<script>", "", "classification", True, "2 classes of <script>")
    for html in (
        part("result", entry, changed.predictions, "<script>", "<script>"),
        part("token", summarize_token(changed, 1, 0)),
        part("notice", "<script>"),
    ):
        assert "<script>" not in html
        assert "&lt;script&gt;" in html


def test_result_says_what_the_model_knows():
    entry = ModelEntry("mine", "", "classification", True, "200 classes of Tiny-ImageNet-200, 47 % top-1")
    html = part("result", entry, [("cat", 0.5)])
    assert "mine knows 200 classes of Tiny-ImageNet-200, 47 % top-1, and nothing else." in html
    assert "Randomly initialised" in part("result", entry._replace(trained=False), [("cat", 0.5)])
