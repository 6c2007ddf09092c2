"""`saccade demo`, with one small family in place of the four."""

import json

import pytest

from saccade.cli import demo, main


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(demo, "FAMILIES", {"svit_nano": "super_tokens"})
    monkeypatch.setattr(demo, "PHOTOS", ("cat",))


def test_it_writes_one_page_that_links_what_it_drew(small, capsys, tmp_path):
    assert main(["demo", "--out", str(tmp_path), "--train-minutes", "0", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert str(tmp_path / "index.html") in out
    page = (tmp_path / "index.html").read_text()
    assert 'href="svit_nano/report.html"' in page
    assert (tmp_path / "svit_nano" / "report.html").is_file()
    assert (tmp_path / "svit_nano" / "cat" / "super_tokens.png").is_file()
    assert page.count("data:image/") >= 2


def test_its_training_part_names_what_was_learned(small, capsys, tmp_path):
    assert main(["demo", "--out", str(tmp_path), "--train-minutes", "0.25", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["training"]["chance"] == 10
    assert 0 <= found["training"]["top1"] <= 100
    assert (tmp_path / "training" / "report.html").is_file()
    assert "its report" in (tmp_path / "index.html").read_text()
