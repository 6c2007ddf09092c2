"""`saccade demo`, reduced to one small family."""

import json

import pytest

from saccade.cli import demo, main
from tests.weights.folder import load_tool, make_run, weights_in


@pytest.fixture
def weights_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "FAMILIES", (demo.Family("svit_nano", "svit_nano", "super_tokens"),))
    monkeypatch.setattr(demo, "EXPLAINED", ("cat",))
    with weights_in(tmp_path / "weights"):
        yield tmp_path / "weights"


def test_demo_writes_a_self_contained_page(weights_folder, capsys, tmp_path):
    assert main(["demo", "--out", str(tmp_path), "--train-minutes", "0", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "[1/1] svit_nano on the bundled photographs" in out
    assert "tokens" in out
    assert str(tmp_path / "index.html") in out
    page = (tmp_path / "index.html").read_text()
    assert 'href="svit_nano/report.html"' in page
    assert (tmp_path / "svit_nano" / "report.html").is_file()
    assert (tmp_path / "svit_nano" / "cat" / "super_tokens.png").is_file()
    assert page.count("data:image/") >= 2 * 8  # eight photographs and their mosaics
    assert 'src="http' not in page


def test_demo_omits_predictions_of_untrained_models(weights_folder, capsys, tmp_path):
    assert main(["demo", "--out", str(tmp_path), "--train-minutes", "0", "--device", "cpu", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["models"]
    assert row["trained"] is False
    assert set(row["predictions"]) == {
        "astronaut", "brick", "camera", "cat", "clock", "coffee", "retina", "rocket",
    }  # fmt: skip
    assert not any(row["predictions"].values())
    page = (tmp_path / "index.html").read_text()
    assert "All models are randomly initialised" in page
    assert "untrained</td>" in page


def test_demo_predicts_with_embedded_weights(weights_folder, capsys, tmp_path):
    load_tool().embed(make_run(tmp_path / "run"), "tiny_imagenet")
    with weights_in(weights_folder):
        assert main(["demo", "--out", str(tmp_path), "--train-minutes", "0", "--device", "cpu", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["models"]
    assert row["trained"] is True
    assert {prediction["class"] for prediction in row["predictions"]["cat"]} == {
        "tabby",
        "espresso",
        "goldfish",
        "crane",
    }
    page = (tmp_path / "index.html").read_text()
    assert row["predictions"]["cat"][0]["class"] in page
    assert "untrained</td>" not in page
    assert "andomly initialised" not in page


def test_family_without_weights_uses_its_larger_model(weights_folder):
    family = demo.Family("vt_nano", "vt_resnet18", "mosaic")
    assert family.model == "vt_resnet18"
    load_tool().embed(make_run(weights_folder.parent / "run", "vt_nano"), "tiny_imagenet")
    assert family.model == "vt_nano"
    rows = [{"model": "a", "trained": True}, {"model": "b", "trained": False}]
    assert "Randomly initialised, predictions omitted: b." in demo.weights_notice(rows)


def test_demo_replaces_the_training_run_of_an_earlier_demo(weights_folder, capsys, tmp_path):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / ".demo").touch()
    (tmp_path / "training" / "last.ckpt").touch()  # left by an interrupted demo
    assert main(["demo", "--out", str(tmp_path), "--train-minutes", "0.25", "--device", "cpu", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["training"]["chance"] == 10
    assert document["training"]["pretrained"] is False
    assert 0 <= document["training"]["top1"] <= 100
    assert (tmp_path / "training" / "report.html").is_file()
    assert "Training report" in (tmp_path / "index.html").read_text()


def test_demo_does_not_overwrite_a_user_run(weights_folder, capsys, tmp_path):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "last.ckpt").write_text("mine")
    assert main(["demo", "--out", str(tmp_path), "--train-minutes", "0.1", "--device", "cpu", "--json"]) == 1
    assert "already contains a run" in capsys.readouterr().err
    assert (tmp_path / "training" / "last.ckpt").read_text() == "mine"


def test_demo_figures_exist_in_the_code_of_their_family():
    """The figure that the page shows of each family is one that `saccade.explain` draws."""
    from pathlib import Path

    from saccade import explanation

    sources = "".join(path.read_text() for path in Path(explanation.__file__).parent.rglob("*.py"))
    for family in demo.FAMILIES:
        assert f'"{family.figure}"' in sources, family
