"""`saccade reproduce`: the list, refused flags, a run of a claim by fake workers."""

import json
from pathlib import Path

import pytest

from saccade.cli import main
from saccade.reproduce.claim import load_claims
from saccade.reproduce.runner import Runner
from tests.reproduce.test_page import store


def test_list_has_every_claim_and_its_runs(tmp_path, capsys):
    store(tmp_path, load_claims()["svit-cpe"], {"CPE": [40.0, 41.0]})
    assert main(["reproduce", "--list", "--out", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    runs = {entry["claim"]: (entry["runs"], entry["planned"]) for entry in document["claims"]}
    assert set(runs) == set(load_claims())
    assert runs["svit-cpe"] == (2, 6)
    assert [entry["name"] for entry in document["released"]] == ["paca-clusters", "paca-models", "sparseformer-models"]
    assert main(["reproduce", "--list", "vt"]) == 0
    text = capsys.readouterr().out
    assert "vt-projector" in text
    assert "svit-cpe" not in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["svit-cpe"], "expected --data with the folder tiny-imagenet (or scenes), got none"),
        (["svit-cpr", "--data", "scenes"], "Did you mean svit-cpe?"),
        (["vt-fpn", "--data", "a/cifar10"], "vt-fpn needs the data set camvid"),
        (["svit-cpe", "--data", "nowhere/tiny-imagenet"], "no data at nowhere/tiny-imagenet"),
        (
            ["svit-cpe", "--data", "scenes", "--seeds", "0"],
            "argument --seeds: expected an integer of at least 1, got 0",
        ),
        (["svit-cpe", "--data", "scenes", "--budget", "0"], "argument --budget: expected a number above 0, got 0."),
        (["svit-cpe", "--data", "scenes", "--limit", "5"], "--limit is for released weights"),
        (["svit-cpe", "--data", "scenes", "--batch", "1"], "--batch is for released weights"),
        (["paca-clusters", "--data", "nowhere"], "no data at nowhere. Give --data the folder of ImageNet."),
        (
            ["paca-clusters", "--data", "scenes", "--limit", "0"],
            "argument --limit: expected an integer of at least 1, got 0",
        ),
        (["--list", "--data", "scenes"], "--data is for runs, not for --list"),
    ],
)
def test_wrong_usage_is_one_line(flags, message, tmp_path, capsys):
    try:
        code = main(["reproduce", *flags, "--out", str(tmp_path / "out")])
    except SystemExit as stop:  # of the parser
        code = stop.code
    assert code == (1 if "no data at" in message else 2)
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("foo=1", "unknown key foo. Known keys: task"),
        ("foo", "--set 'foo': expected key=value"),
        ("optimizer.lr=.nan", "expected finite numbers for optimizer.lr, got nan."),
    ],
)
def test_invalid_change_starts_no_run(change, message, tmp_path, capsys):
    assert main(["reproduce", "svit-cpe", "--data", "scenes", "--set", change, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_command_runs_claims_and_continues_with_resume(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Runner, "worker", "tests.reproduce.fake_worker")
    monkeypatch.setattr(Runner, "preload", ("torch", "saccade.reproduce.runner"))
    monkeypatch.chdir(Path(__file__).parents[2])
    command = ["reproduce", "svit-cpe", "svit-position", "--data", "scenes", "--device", "cpu", "--json"]
    command += ["--seeds", "2", "--jobs", "2", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["runs"], document["remaining"], document["failed"]) == (
        8,
        0,
        [],
    )  # 4 arms, 2 of them in both claims
    assert [entry["verdict"] for entry in document["claims"]] == ["no difference at this scale"] * 2
    page = (tmp_path / "out/claims.md").read_text()
    assert "### svit-position" in page
    assert (tmp_path / "out/claims.png").is_file()
    assert main(command) == 1
    assert "already contains runs. Continue them with --resume" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
    assert json.loads(capsys.readouterr().out)["remaining"] == 0
    assert len((tmp_path / "out/started.txt").read_text().splitlines()) == 8


def test_changed_recipes_are_named_on_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Runner, "worker", "tests.reproduce.fake_worker")
    monkeypatch.setattr(Runner, "preload", ("torch", "saccade.reproduce.runner"))
    monkeypatch.chdir(Path(__file__).parents[2])
    command = ["reproduce", "svit-cpe", "--data", "scenes", "--device", "cpu", "--seeds", "1", "--set", "epochs=1"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    assert "Recipes changed by `epochs=1`: not the claims' own recipes." in (tmp_path / "out/claims.md").read_text()
