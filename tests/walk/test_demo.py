"""`saccade demo`, with one small family in place of the four."""

import json

import pytest

from saccade.cli import demo, main
from tests.weights.folder import load_tool, make_run, weights_in


@pytest.fixture
def small(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "FAMILIES", (demo.Family("svit_nano", "svit_nano", "super_tokens"),))
    monkeypatch.setattr(demo, "SHOWN", ("cat",))
    with weights_in(tmp_path / "weights"):
        yield tmp_path / "weights"


def test_it_writes_one_page_that_links_what_it_drew(small, capsys, tmp_path):
    assert main(["demo", "--out", str(tmp_path), "--train-minutes", "0", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "[1/1] svit_nano looks at the photographs" in out
    assert "tokens" in out
    assert str(tmp_path / "index.html") in out
    page = (tmp_path / "index.html").read_text()
    assert 'href="svit_nano/report.html"' in page
    assert (tmp_path / "svit_nano" / "report.html").is_file()
    assert (tmp_path / "svit_nano" / "cat" / "super_tokens.png").is_file()
    assert page.count("data:image/") >= 2 * 8  # every photograph and its mosaic
    assert 'src="http' not in page


def test_fresh_weights_give_no_answers(small, capsys, tmp_path):
    assert main(["demo", "--out", str(tmp_path), "--train-minutes", "0", "--device", "cpu", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["models"]
    assert row["trained"] is False
    assert set(row["predictions"]) == {
        "astronaut", "brick", "camera", "cat", "clock", "coffee", "retina", "rocket",
    }  # fmt: skip
    assert not any(row["predictions"].values())
    page = (tmp_path / "index.html").read_text()
    assert "The models have fresh weights" in page
    assert "fresh weights</td>" in page


def test_embedded_weights_answer(small, capsys, tmp_path):
    load_tool().embed(make_run(tmp_path / "run"), "tiny_imagenet")
    with weights_in(small):
        assert main(["demo", "--out", str(tmp_path), "--train-minutes", "0", "--device", "cpu", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["models"]
    assert row["trained"] is True
    assert {answer["class"] for answer in row["predictions"]["cat"]} == {"tabby", "espresso", "goldfish", "crane"}
    page = (tmp_path / "index.html").read_text()
    assert row["predictions"]["cat"][0]["class"] in page
    assert "fresh weights" not in page


def test_a_family_without_weights_shows_its_larger_model(small):
    family = demo.Family("vt_nano", "vt_resnet18", "mosaic")
    assert family.model == "vt_resnet18"
    load_tool().embed(make_run(small.parent / "run", "vt_nano"), "tiny_imagenet")
    assert family.model == "vt_nano"
    both = [{"model": "a", "trained": True}, {"model": "b", "trained": False}]
    assert "b: fresh weights" in demo.honesty(both)


def test_its_training_part_names_what_was_learned_and_can_be_run_again(small, capsys, tmp_path):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / ".demo").touch()
    (tmp_path / "training" / "last.ckpt").touch()  # what an interrupted demo leaves
    assert main(["demo", "--out", str(tmp_path), "--train-minutes", "0.25", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["training"]["chance"] == 10
    assert found["training"]["pretrained"] is False
    assert 0 <= found["training"]["top1"] <= 100
    assert (tmp_path / "training" / "report.html").is_file()
    assert "Its report" in (tmp_path / "index.html").read_text()


def test_a_run_of_someone_elses_is_left_alone(small, capsys, tmp_path):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "last.ckpt").write_text("mine")
    assert main(["demo", "--out", str(tmp_path), "--train-minutes", "0.1", "--device", "cpu", "--json"]) == 1
    assert "holds a run already" in capsys.readouterr().err
    assert (tmp_path / "training" / "last.ckpt").read_text() == "mine"
