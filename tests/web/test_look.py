"""What the page shows is what the model did."""

import numpy as np
import pytest
import torch
from PIL import Image

from saccade.explain.scores.importance import occlusion_importance
from saccade.explain.subject import load_subject
from saccade.web import words
from saccade.web.look import (
    facts,
    first_token,
    look_at,
    mosaic_picture,
    sheet,
    stage_of,
    token_at,
    token_facts,
    token_picture,
)

NANO = ("svit_nano", "paca_nano", "sparseformer_nano", "vt_nano")


@pytest.fixture(scope="module")
def looks():
    from saccade.data.photos import photo_paths

    picture = Image.open(photo_paths()["cat"]).resize((96, 64))
    return {name: look_at(load_subject(name), picture, "cat.jpg") for name in NANO}


@pytest.mark.parametrize("name", NANO)
def test_the_answers_are_the_models(looks, name):
    look = looks[name]
    with torch.no_grad():
        chances = look.subject.model.eval()(look.images).softmax(1)[0]
    best = chances.topk(5)
    assert [answer for answer, _ in look.answers] == [look.subject.label(int(i)) for i in best.indices]
    np.testing.assert_allclose([chance for _, chance in look.answers], best.values, rtol=1e-4)
    told = facts(look)
    assert told["looked_at"] == list(look.images.shape[:1:-1])
    assert [len(stage["importance"]) for stage in told["stages"]] == [at.step.count for at in look.stages]
    assert told["tokens"] < told["pixels"] or name == "sparseformer_nano"


@pytest.mark.parametrize("name", NANO)
def test_a_click_finds_the_token_that_leads_there(looks, name):
    look = looks[name]
    size = look.picture.shape[:2]
    for stage in (1, len(look.stages)):
        maps = stage_of(look, stage).step.maps(size)
        for x, y in ((0.1, 0.2), (0.5, 0.5), (0.9, 0.7)):
            here = maps[:, int(y * size[0]), int(x * size[1])]
            if here.max() > 0:
                assert here[token_at(look, stage, x, y)] == here.max()
    assert 0 <= token_at(look, 1, -3, 7) < look.stages[0].step.count  # outside: the nearest


def test_where_no_token_looks_the_nearest_is_taken(looks):
    look = looks["vt_nano"]
    at = stage_of(look, 1)
    empty = np.full(at.size, -1, np.int16)
    empty[10, 20] = 3
    at.__dict__["owners"] = (empty, at.owners[1])
    try:
        assert token_at(look, 1, 0.9, 0.9) == 3
        empty[10, 20] = -1
        assert token_at(look, 1, 0.9, 0.9) == 0
    finally:
        del at.__dict__["owners"]


@pytest.mark.parametrize("name", NANO)
def test_a_token_is_told_by_its_map_and_its_importance(looks, name):
    look = looks[name]
    last = len(look.stages)
    at, token = look.stages[-1], first_token(look, last)
    told = token_facts(look, last, token)
    assert told["rank"] == 1
    assert told["gradient"] == pytest.approx(at.importance.max(), abs=1e-5)
    drops = occlusion_importance(look.subject.model, look.images, look.score, at.step.index, at.step.count)
    assert told["drop"] == pytest.approx(float(drops[token]), abs=2e-5)
    assert told["owns"] == pytest.approx((at.labels == token).mean(), abs=1e-4)
    others = [token_picture(look, last, n) for n in range(min(3, at.step.count))]
    if name != "vt_nano":  # its fresh filters all look everywhere
        assert not np.array_equal(others[0], others[1])
    assert others[0].shape == look.picture.shape


def test_opacity_goes_from_the_photograph_to_the_mosaic(looks):
    look = looks["svit_nano"]
    np.testing.assert_array_equal(mosaic_picture(look, 1, 0), look.picture)
    full, half = mosaic_picture(look, 1, 1), mosaic_picture(look, 1, 0.5)
    middle = (full.astype(float) + look.picture) / 2
    assert np.abs(half - middle).max() <= 1
    np.testing.assert_array_equal(mosaic_picture(look, 1, 7), full)
    np.testing.assert_array_equal(token_picture(look, 1, 0, 0), look.picture)


def test_numbers_beyond_the_last_are_the_last(looks):
    look = looks["paca_nano"]
    assert stage_of(look, 99) is look.stages[-1]
    assert stage_of(look, -1) is look.stages[0]
    assert token_facts(look, 1, 9999)["token"] == look.stages[0].step.count - 1


def test_the_sheet_says_what_it_is(looks):
    look = looks["svit_nano"]
    drawn = np.array(sheet(look, 1, 0))
    assert drawn.shape[1] > 1300
    assert drawn.std() > 20


def test_a_look_leaves_the_model_as_it_was(looks):
    subject = looks["svit_nano"].subject
    before = {key: value.clone() for key, value in subject.model.state_dict().items()}
    subject.model.train()
    look_at(subject, Image.new("RGB", (64, 64), "teal"))
    assert subject.model.training
    subject.model.eval()
    assert all(torch.equal(value, before[key]) for key, value in subject.model.state_dict().items())
    assert not any(p.grad is not None for p in subject.model.parameters())
    assert not any(module._forward_hooks for module in subject.model.modules())


def test_words_escape_what_came_from_outside(looks):
    look = looks["svit_nano"]
    hostile = look.subject._replace(labels=["<script>alert(1)</script>"] * 1000)
    changed = look_at(hostile, Image.new("RGB", (64, 64)), "<img src=x>")
    for html in (words.answers(changed), words.token(token_facts(changed, 1, 0)), words.notice("<script>")):
        assert "<script>" not in html
        assert "&lt;script&gt;" in html
    assert "Fresh weights" in words.answers(look)
    assert "Fresh weights" not in words.answers(look_at(hostile._replace(trained=True), Image.new("RGB", (64, 64))))
