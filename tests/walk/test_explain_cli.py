"""`saccade explain` from the command line."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from saccade.cli import main


def run(capsys, *words):
    try:
        code = main(["explain", *map(str, words)])
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_explain_writes_a_report(capsys, tmp_path):
    code, out, err = run(
        capsys, "cat", "--model", "svit_nano", "--out", tmp_path, "--importance", "gradient", "--arrays"
    )
    assert (code, err) == (0, "")
    assert f"wrote {tmp_path}/report.html" in out
    assert "The weights are randomly initialised" in out
    assert sorted(path.name for path in (tmp_path / "cat").iterdir()) == [
        "anchor.png",
        "arrays.npz",
        "mosaic.png",
        "relations.png",
        "super_tokens.png",
        "tokens.png",
    ]
    assert np.load(tmp_path / "cat" / "arrays.npz")["maps/stages.0.blocks.0"].ndim == 3


def test_explain_json_prints_only_json(capsys, tmp_path):
    code, out, _ = run(capsys, "clock", "--model", "svit_nano", "--out", tmp_path, "--json", "--importance", "none")
    document = json.loads(out)
    assert code == 0
    assert document["images"][0]["name"] == "clock.jpg"
    assert document["page"].endswith("report.html")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--model", "svit_nano"], 2, "expected either images or --score DATA"),
        (["cat"], 2, "--model"),
        (["gone.jpg", "--model", "svit_nano"], 1, "gone.jpg: no such file"),
        (["cat", "--model", "svit_nan"], 2, "Did you mean 'svit_nano'"),
        (["cat", "--model", "gone.safetensors"], 1, "no such checkpoint"),
        (["cat", "--model", "svit_nano", "--anchor", "left"], 2, "expected --anchor X,Y"),
        (
            ["cat", "--model", "svit_nano", "--size", "8"],
            2,
            "argument --size: expected an integer from 32 to 16384, got 8.",
        ),
        (["cat", "--model", "svit_nano", "--target", "unicorn"], 2, "of a class of this model, got 'unicorn'"),
        (
            ["cat", "--model", "svit_nano", "--max-tokens", "0"],
            2,
            "argument --max-tokens: expected an integer of at least 1, got 0.",
        ),
        (["cat", "--model", "svit_nano", "--most", "3"], 2, "--most was renamed to --max-tokens."),
        (["cat", "--model", "svit_nano", "--set", "stems=1"], 2, "unexpected keyword argument 'stems'"),
        (
            ["cat", "--model", "svit_nano", "--target", "1000"],
            2,
            "index (0 to 999) of a class of this model, got '1000'",
        ),
        (["cat", "--model", "svit_nano", "--target", "-5"], 2, "index (0 to 999) of a class of this model, got '-5'"),
        (["cat", "--model", "svit_nano", "--limit", "3"], 2, "--limit is for --score, not for images. Remove it."),
        (
            ["cat", "--model", "svit_nano", "--compare", "vit"],
            2,
            "expected timm's ViTs or Swins in --compare, got 'vit'",
        ),
        (["cat", "--model", "paca_nano", "--anchor", "0.1,0.1"], 2, "anchor is for super token attention (svit_*)"),
        (
            ["cat", "--model", "svit_nano", "--out", "notes.txt"],
            1,
            "expected a folder for --out notes.txt, got the file",
        ),
        (["--score", "scenes", "--model", "svit_nano", "--target", "3"], 2, "--target is for images, not for --score."),
        (["--score", "scenes", "--model", "svit_nano", "--all"], 2, "--all is for images, not for --score. Remove it."),
        (["--score", "gone", "--model", "svit_nano"], 1, "no data at gone: expected"),
        (["cat", "--model", "svit_nano", "--importance", "magic"], 2, "invalid choice"),
    ],
)
def test_explain_errors_are_one_line(capsys, tmp_path, monkeypatch, words, code, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    exit_code, out, err = run(capsys, *words)
    assert (exit_code, out) == (code, "")
    assert message in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_explain_refuses_an_unknown_checkpoint(capsys, tmp_path):
    torch.save({"state_dict": {"fc.weight": torch.zeros(3, 3)}}, tmp_path / "other.pth")
    code, _, err = run(capsys, "cat", "--model", tmp_path / "other.pth")
    assert code == 1
    assert "no registered model has the tensors of this checkpoint" in err


def test_explain_skips_a_missing_image(capsys, tmp_path):
    code, out, err = run(
        capsys, "cat", tmp_path / "no.jpg", "--model", "svit_nano", "--out", tmp_path, "--importance", "none"
    )
    assert code == 1
    assert "wrote" in out
    assert "no.jpg: no such file" in err


def test_explain_scores_a_labelled_set(capsys, tmp_path):
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    image = np.zeros((40, 60, 3), np.uint8)
    image[:, 30:] = (200, 120, 40)
    Image.fromarray(image).save(tmp_path / "images" / "a.png")
    Image.fromarray((image[..., 0] > 0).astype(np.uint8)).save(tmp_path / "masks" / "a.png")
    code, out, _ = run(capsys, "--score", tmp_path, "--model", "svit_nano", "--out", tmp_path / "out", "--json")
    document = json.loads(out)
    assert code == 0
    assert {row["method"] for row in document["superpixels"]} == {"tokens", "SLIC", "average pooling"}
    code, out, _ = run(capsys, "--score", tmp_path, "--model", "svit_nano", "--out", tmp_path / "out")
    assert code == 0
    assert "SLIC" in out
    assert (tmp_path / "out" / "scores.png").exists()
