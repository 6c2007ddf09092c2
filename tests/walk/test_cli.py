"""The command line as a person uses it: exit codes, messages, tables, JSON, files."""

import json
import re

import pytest
import torch

from saccade.cli import COMMANDS, main, make_parser, pick_device, settings
from tests.parity import kit


def run(capsys, *words):
    """Exit code, stdout, stderr."""
    try:
        code = main(list(words))
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_every_command_has_help_with_an_example(capsys):
    commands = next(action for action in make_parser()._actions if action.dest == "command").choices
    assert list(commands) == [name for name in COMMANDS if name in commands]
    assert {"models", "convert", "bench"} <= set(commands)
    for name in commands:
        code, out, _ = run(capsys, name, "--help")
        assert code == 0
        assert re.search(rf"example: saccade {name} ", out), name
        assert all(flag in out for flag in ("--out", "--set", "--device", "--seed", "--json")), name


def test_wrong_usage_is_2_and_failure_is_1(capsys):
    assert run(capsys)[0] == 2
    assert run(capsys, "nonsense")[0] == 2
    assert run(capsys, "bench")[0] == 2
    code, out, err = run(capsys, "models", "nothing*")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "no model matches" in err


def test_version(capsys):
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert re.fullmatch(r"\d+\.\d+.*\n", out)


def test_models_prints_measured_beside_reported(capsys):
    code, out, _ = run(capsys, "models", "svit_small", "--json")
    (row,) = json.loads(out)
    assert code == 0
    assert row["params"] == 25_495_624
    assert row["paper_params"] == "25"
    assert row["paper_top1"] == 83.6
    assert abs(row["madds"] / 1e9 - 4.34) < 0.01
    assert row["madds_difference"] == -1.4
    code, out, _ = run(capsys, "models", "svit*", "--max-params", "30")
    assert "svit_small" in out
    assert "svit_base" not in out
    larger = json.loads(run(capsys, "models", "svit_small", "--size", "384", "--json")[1])[0]
    assert larger["paper_madds"] is None
    assert larger["madds"] > 3 * row["madds"]


def test_models_counts_an_ablation(capsys):
    plain = json.loads(run(capsys, "models", "svit_small", "--set", "ffn=plain", "--json")[1])[0]
    assert plain["params"] < 25_495_624
    assert plain["paper_params"] is None


def test_convert_names_the_model_and_writes_its_file(capsys, tmp_path):
    torch.save({"model": kit.weights("stvit_small")}, tmp_path / "official.pth")
    target = tmp_path / "ours.safetensors"
    code, out, err = run(capsys, "convert", str(tmp_path / "official.pth"), str(target), "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["model"] == "svit_small"
    assert json.loads(out)["num_classes"] == 1000
    code, out, _ = run(capsys, "convert", str(target), str(tmp_path / "again.safetensors"))
    assert code == 0
    assert target.read_bytes()[:100] != b""
    assert "svit_small, 1000 classes" in out


def test_convert_refuses_what_it_cannot_do(capsys, tmp_path):
    code, _, err = run(capsys, "convert", str(tmp_path / "absent.pth"), str(tmp_path / "out.safetensors"))
    assert code == 1
    assert "no such checkpoint" in err
    code, _, err = run(capsys, "convert", str(tmp_path / "absent.pth"), str(tmp_path / "out.pth"))
    assert code == 1
    assert "must end in .safetensors" in err
    assert list(tmp_path.iterdir()) == []


def test_bench_measures_side_by_side_and_keeps_its_circumstances(capsys, tmp_path):
    words = "bench svit_nano resnet10t --sizes 64 --batch 2 --rounds 2 --seconds 0 --mode inference train --json"
    code, out, _ = run(capsys, *words.split(), "--out", str(tmp_path), "--device", "cpu")
    assert code == 0
    document = json.loads(out)
    assert [(row["model"], row["mode"]) for row in document["rows"]] == [
        ("svit_nano", "inference"),
        ("resnet10t", "inference"),
        ("svit_nano", "train"),
        ("resnet10t", "train"),
    ]
    for row in document["rows"]:
        assert len(row["rounds"]) == 2
        assert row["images_per_second"] == pytest.approx(2 / row["seconds"])
        assert row["baseline"] == "svit_nano"
    assert document["rows"][0]["ratio"] == 1
    assert {"device", "torch", "date", "commit"} <= document["machine"].keys()
    (saved,) = tmp_path.glob("*.json")
    assert json.loads(saved.read_text()) == document


def test_bench_scaling_draws_cost_against_pixels(capsys, tmp_path):
    words = "bench svit_nano --scaling --sizes 64 96 --batch 1 --rounds 1 --seconds 0 --device cpu"
    code, out, _ = run(capsys, *words.split(), "--out", str(tmp_path))
    assert code == 0
    assert "svit_nano" in out
    (picture,) = tmp_path.glob("*scaling.png")
    assert picture.stat().st_size > 10_000
    madds = [row["madds"] for row in json.loads(next(tmp_path.glob("*.json")).read_text())["rows"]]
    assert madds[1] / madds[0] == pytest.approx((96 / 64) ** 2, rel=0.1)  # linear in pixels


def test_bench_names_an_unknown_model(capsys):
    code, _, err = run(capsys, "bench", "svit_enormous")
    assert code == 1
    assert "unknown model 'svit_enormous'" in err


def test_settings_are_literals_or_text():
    assert settings(["a=1", "b=(2, 3)", "c=conv", "d=None"]) == {"a": 1, "b": (2, 3), "c": "conv", "d": None}
    with pytest.raises(ValueError, match="expected KEY=VALUE"):
        settings(["novalue"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of machines without a GPU")
def test_a_gpu_that_is_not_there_is_named():
    assert pick_device("auto") == "cpu"
    with pytest.raises(ValueError, match="no CUDA GPU"):
        pick_device("cuda")


def test_bench_measures_inference_copies_beside_the_originals(capsys):
    words = "bench svit_nano resnet10t --sizes 32 --batch 1 --rounds 1 --seconds 0 --optimize both --json --device cpu"
    code, out, _ = run(capsys, *words.split(), "--memory-format", "contiguous", "channels_last")
    assert code == 0
    rows = json.loads(out)["rows"]
    assert [(row["channels_last"], row["optimized"]) for row in rows[::2]] == [
        (False, False),
        (False, True),
        (True, False),
        (True, True),
    ]
    assert all(row["ratio"] == 1 for row in rows[::2])  # every kind has its own baseline


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--run cuda_graph", "CUDA graphs need a CUDA device, this is cpu"),
        ("--optimize --mode train", "an inference copy cannot be trained"),
        ("--batch 8 0", "--batch 0 cannot be measured: expected 1 or more"),
        ("--sizes 64 -32", "--sizes -32 cannot be measured"),
        ("--rounds 0", "--rounds 0 cannot be measured"),
        ("--threads 0", "--threads 0 cannot be measured"),
        ("--seconds -1", "--seconds -1.0: expected a number of seconds"),
    ],
)
def test_bench_refuses_what_cannot_be_measured(capsys, words, told):
    code, _, err = run(capsys, *f"bench svit_nano --sizes 32 --device cpu {words}".split())
    assert code == 1
    assert told in err
