"""The command line: exit codes, messages, tables, JSON, files."""

import inspect
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import saccade.cli
from saccade._errors import UsageError, model_options
from saccade.cli import COMMANDS, main, make_parser, pick_device, settings
from tests.parity import kit


def run(capsys, *arguments):
    """Return exit code, stdout, stderr."""
    try:
        code = main(list(arguments))
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_lists_exactly_the_commands_that_exist():
    commands = next(action for action in make_parser()._actions if action.dest == "command").choices
    assert list(commands or ()) == list(COMMANDS)
    files = {path.stem for path in Path(saccade.cli.__file__).parent.glob("*.py")}
    assert files - {"__init__", "__main__", "task_options"} == set(COMMANDS)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"], ["nonsense"]])
def test_help_does_not_import_torch(arguments):
    """In a process whose program name is `saccade`, as the console script starts it."""
    code = (
        f"import sys; sys.argv = ['saccade', *{arguments!r}]\n"
        "from saccade.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "print('imported', *{'torch', 'timm', 'numpy', 'PIL', 'lightning', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "imported"


def test_python_dash_m_does_not_import_torch_for_help():
    command = [sys.executable, "-X", "importtime", "-m", "saccade.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "saccade.cli.task_options" in imported  # the commands are imported, torch is not
    assert not {"torch", "timm", "numpy"} & imported


def test_console_script_registers_the_models_before_the_command_runs():
    code = (
        "import sys; sys.argv = ['saccade', 'demo']\n"
        "from saccade.cli import demo, main\n"
        "assert 'timm' not in sys.modules\n"
        "demo.run = lambda args: print(sys.modules['timm'].is_model('svit_nano'))\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


@pytest.mark.parametrize(
    ("arguments", "old", "new"),
    [
        (["explain", "cat", "--model", "svit_nano"], "--most", "--max-tokens"),
        (["serve"], "--waiting", "--queue-size"),
        (["eval", "run", "--data", "scenes"], "--max-bad", "--max-unreadable"),
    ],
)
def test_renamed_flag_is_an_error_that_names_the_new_one(capsys, arguments, old, new):
    code, _, err = run(capsys, *arguments, old, "3")
    assert code == 2
    assert f"{old} was renamed to {new}." in err


def test_every_command_has_help_with_an_example(capsys):
    for name in COMMANDS:
        code, out, _ = run(capsys, name, "--help")
        assert code == 0
        assert re.search(rf"example: saccade {name} ", out), name
        module = import_module(f"saccade.cli.{name}")
        assert set(module.FLAGS) <= {"out", "set", "device", "seed"}, name
        for flag in ("out", "set", "device", "seed", "json"):
            listed = re.search(rf"^  --{flag}\b", out, re.MULTILINE) is not None
            own = f'"--{flag}"' in inspect.getsource(module.add_arguments)  # with a meaning of its own
            assert listed == (flag in (*module.FLAGS, "json") or own), (name, flag)


def test_exit_code_is_2_for_wrong_usage_and_1_for_failure(capsys):
    assert run(capsys)[0] == 2
    assert run(capsys, "nonsense")[0] == 2
    assert run(capsys, "bench")[0] == 2
    code, out, err = run(capsys, "models", "nothing*")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "no model matches" in err
    assert run(capsys, "convert", "gone.pth", "out.safetensors")[0] == 1


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("models svit_nano --size 0", "argument --size: expected an integer from 1 to 16384, got 0."),
        ("models svit_nano --max-params nan", "argument --max-params: expected a number above 0, got nan."),
        ("models svit_nano --max-params 0", "argument --max-params: expected a number above 0, got 0."),
        ("models svit_nano --family vit", "no model matches"),
        ("models svit_nano --plot notes.txt", "argument --plot: expected a file name with .png, .svg, .pdf, .jpg"),
        ("models svit_nano --set stems=1", "unexpected keyword argument 'stems'"),
        ("models svit_nano --set depths={[]:1}", "svit_nano cannot be created with depths='{[]:1}': depths must be 4"),
        ("models svit_nano --set name=1", "svit_nano cannot be created with name=1"),
        ("bench resnet10t --sizes 32 --set depths=1", "--set is for saccade's models, got resnet10t only."),
        ("bench svit_nano --sizes 20000", "argument --sizes: expected an integer from 1 to 16384, got 20000."),
        ("bench svit_nano --sizes 1e9", "argument --sizes: expected an integer from 1 to 16384, got 1e9."),
        ("bench svit_nano --sizes 32 --set stems=1", "unexpected keyword argument 'stems'"),
        ("bench svit_nano --device fast", "argument --device: expected cpu, cuda or cuda:N, got fast."),
        ("bench svit_nano --mode play", "argument --mode: invalid choice: 'play'"),
        ("bench svit_nano --speed 3", "unrecognized arguments: --speed 3. `saccade bench --help` lists the options."),
        ("convert notes.txt notes.pth", "expected OUT to end in .safetensors, got notes.pth."),
        ("convert notes.txt a.safetensors --model svit_nono", "unknown model 'svit_nono'"),
        ("bench svit_nano --name a", "--name names the files in --out, got no --out. Add it."),
        ("export svit_nano+foo --out a.onnx", "no weights 'svit_nano+foo' exist, and no file or folder has this name."),
        (
            "export svit_nano --out a.pt2 --dynamic batch,",
            "expected dynamic axes out of batch, size; got an empty name.",
        ),
        (
            "eval svit_nono --data scenes",
            "unknown model 'svit_nono', and no file or folder has this name. Did you mean",
        ),
        ("predict svit_nono notes.txt", "unknown model 'svit_nono'"),
        ("predict svit_nono notes.txt --format parquet --out a", "unknown model 'svit_nono'"),
        (
            "export svit_nano --set depths=(1,) --out a.onnx",
            "svit_nano cannot be created with depths=(1,): depths must be",
        ),
        ("pull --list --from notes.txt", "--from converts a file, --list lists the released ones. Leave one out."),
        ("pull svit_nono", "expected a released model, got 'svit_nono'."),
        ("demo --train-minutes nan", "argument --train-minutes: expected a number of at least 0, got nan."),
        ("predict svit_nano notes.txt --csv --json", "--csv and --json exclude each other. Leave one out."),
    ],
)
def test_wrong_usage_is_one_line(capsys, tmp_path, monkeypatch, command, message):
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("hello")
    code, out, err = run(capsys, *command.split())
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("position", range(4))
def test_empty_arguments_are_refused(capsys, position):
    words = ["predict", "svit_nano", "cat.png", "--out", "x"]
    words[position + 1] = ""
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("saccade: expected no empty arguments, got one. Is a variable of the shell unset?")
    assert err.count("\n") == 1


def test_every_number_has_a_range():
    """A flag of a bare int or float would accept zero, negative numbers or NaN."""
    commands: Any = next(action for action in make_parser()._actions if action.dest == "command").choices
    types = {(name, action.dest): action.type for name, sub in commands.items() for action in sub._actions}
    assert [flag for flag, kind in types.items() if kind in (int, float)] == []
    ranged = [flag for flag, kind in types.items() if kind is not None and "parse" in kind.__qualname__]
    assert len(ranged) == 56


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"hello", "is no checkpoint: expected a .safetensors file, or a .pth file of torch.save."),
        (b"", "is damaged or incomplete"),
        (b"PK\x03\x04", "is damaged or incomplete"),
    ],
)
@pytest.mark.parametrize("suffix", ["txt", "safetensors"])
def test_a_file_that_is_no_checkpoint_is_one_line(capsys, tmp_path, content, message, suffix):
    file = tmp_path / f"file.{suffix}"
    file.write_bytes(content)
    for command in (["convert", file, tmp_path / "a.safetensors"], ["eval", file, "--data", "scenes"]):
        code, out, err = run(capsys, *map(str, command))
        assert (code, out) == (1, "")
        assert (message if suffix == "txt" else "is damaged or incomplete") in err
        assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("name", ["x.svg", "x.pdf", "x.jpg"])
def test_models_writes_the_format_of_the_suffix(capsys, tmp_path, name):
    starts = {"svg": b"<?xml", "pdf": b"%PDF", "jpg": b"\xff\xd8"}
    assert run(capsys, "models", "svit_nano", "--plot", str(tmp_path / name))[0] == 0
    assert (tmp_path / name).read_bytes().startswith(starts[name[2:]])


@pytest.mark.parametrize(
    "command",
    [
        "train --model svit_nano --data scenes",
        "eval svit_nano --data scenes",
        "predict svit_nano cat.png",
        "explain cat --model svit_nano",
        "bench svit_nano",
        "reproduce svit-cpe --data scenes",
        "demo",
    ],
)
def test_out_below_a_file_is_refused_before_the_work(capsys, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    Path("notes").write_text("hello")
    code, out, err = run(capsys, *command.split(), "--out", "notes/a")
    assert (code, out) == (1, "")
    assert "expected a folder for --out notes/a, got the file " in err
    assert err.endswith("notes. Choose another --out.\n")
    assert err.count("\n") == 1
    if os.geteuid():  # root may write everywhere
        Path("locked").mkdir(mode=0o500)
        assert (
            "expected a folder to write to for --out locked/a" in run(capsys, *command.split(), "--out", "locked/a")[2]
        )


def test_error_of_the_file_system_names_the_file(capsys, tmp_path):
    (tmp_path / "notes").write_text("hello")
    code, _, err = run(capsys, "models", "svit_nano", "--plot", str(tmp_path / "notes/a.png"))
    assert code == 1
    assert "[Errno" not in err
    assert err.endswith("Check the path, its permissions and the free space.\n")


def test_version_is_printed(capsys):
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert re.fullmatch(r"\d+\.\d+.*\n", out)


def test_models_prints_measured_and_published_cost(capsys):
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


@pytest.mark.shows("X-02")
def test_models_prints_cost_per_stage(capsys):
    code, out, _ = run(capsys, "models", "svit_nano", "--per-stage", "--json")
    (row,) = json.loads(out)
    assert code == 0
    assert sum(part["madds"] for part in row["parts"].values()) == row["madds"]
    assert {"stem", "stages.0", "stages.3", "head"} <= set(row["parts"])
    _, table, _ = run(capsys, "models", "svit_nano", "--per-stage")
    assert "stages.2" in table
    assert "stages.2" not in run(capsys, "models", "svit_nano")[1]


@pytest.mark.shows("VT-75")
def test_models_writes_a_plot(capsys, tmp_path):
    path = tmp_path / "plots" / "svit.png"
    code, out, _ = run(capsys, "models", "svit_nano", "--plot", str(path))
    assert code == 0
    assert str(path) in "".join(out.split("\n"))
    assert path.read_bytes().startswith(b"\x89PNG")
    code, _, err = run(capsys, "models", "video_sparseformer_nano", "--plot", str(path))
    assert code != 0
    assert "expected a family of an ImageNet table to plot, got video_sparseformer" in err


def test_models_omits_published_cost_of_an_ablation(capsys):
    plain = json.loads(run(capsys, "models", "svit_small", "--set", "ffn=plain", "--json")[1])[0]
    assert plain["params"] < 25_495_624
    assert plain["paper_params"] is None


def test_convert_identifies_the_model(capsys, tmp_path):
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


def test_convert_rejects_missing_input_and_wrong_suffix(capsys, tmp_path):
    code, _, err = run(capsys, "convert", str(tmp_path / "absent.pth"), str(tmp_path / "out.safetensors"))
    assert code == 1
    assert "no such checkpoint" in err
    code, _, err = run(capsys, "convert", str(tmp_path / "absent.pth"), str(tmp_path / "out.pth"))
    assert code == 2
    assert "expected OUT to end in .safetensors" in err
    assert list(tmp_path.iterdir()) == []


def test_bench_writes_rows_with_machine_and_conditions(capsys, tmp_path):
    command = "bench svit_nano resnet10t --sizes 64 --batch 2 --rounds 2 --seconds 0 --mode inference train --json"
    code, out, _ = run(capsys, *command.split(), "--out", str(tmp_path), "--device", "cpu")
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
    page = saved.with_suffix(".html").read_text()
    assert page.count("<tr><td>svit_nano</td>") == 2
    assert not saved.with_suffix(".png").exists()  # no published accuracy at 64 px


def test_bench_prints_measurements_before_it_writes_files(capsys, tmp_path, monkeypatch):
    def full_disk(*_):
        raise OSError(28, "No space left on device", "file")

    monkeypatch.setattr("saccade.cli.bench.write_results", full_disk)
    command = "bench svit_nano --sizes 32 --batch 1 --rounds 1 --seconds 0 --device cpu"
    code, out, err = run(capsys, *command.split(), "--out", str(tmp_path / "out"))
    assert code == 1
    assert "svit_nano" in out
    assert "saccade bench: file: No space left on device. Check the path, its permissions" in err


def test_bench_scaling_plots_cost_against_image_size(capsys, tmp_path):
    command = "bench svit_nano --scaling --sizes 64 96 --batch 1 --rounds 1 --seconds 0 --device cpu"
    code, out, _ = run(capsys, *command.split(), "--out", str(tmp_path))
    assert code == 0
    assert "svit_nano" in out
    (plot,) = tmp_path.glob("*scaling.png")
    assert plot.stat().st_size > 10_000
    madds = [row["madds"] for row in json.loads(next(tmp_path.glob("*.json")).read_text())["rows"]]
    assert madds[1] / madds[0] == pytest.approx((96 / 64) ** 2, rel=0.1)  # linear in pixels


def test_bench_rejects_an_unknown_model(capsys):
    code, _, err = run(capsys, "bench", "svit_enormous")
    assert code == 2
    assert "unknown model 'svit_enormous'" in err


def test_settings_are_literals_or_strings():
    assert settings(["a=1", "b=(2, 3)", "c=conv", "d=None"]) == {"a": 1, "b": (2, 3), "c": "conv", "d": None}
    with pytest.raises(ValueError, match="expected --set KEY=VALUE, got --set novalue"):
        settings(["novalue"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_pick_device_rejects_a_missing_gpu():
    assert pick_device("auto") == "cpu"
    with pytest.raises(ValueError, match="got --device cuda: torch finds no CUDA GPU"):
        pick_device("cuda")


def test_bench_optimize_both_measures_originals_and_copies(capsys):
    command = (
        "bench svit_nano resnet10t --sizes 32 --batch 1 --rounds 1 --seconds 0 --optimize both --json --device cpu"
    )
    code, out, _ = run(capsys, *command.split(), "--memory-format", "contiguous", "channels_last")
    assert code == 0
    rows = json.loads(out)["rows"]
    assert [(row["channels_last"], row["optimized"]) for row in rows[::2]] == [
        (False, False),
        (False, True),
        (True, False),
        (True, True),
    ]
    assert all(row["ratio"] == 1 for row in rows[::2])  # each combination has its own baseline


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--run cuda_graph", "--run cuda_graph needs a CUDA device, got cpu"),
        ("--optimize --mode train", "--optimize copies are inference-only"),
        ("--batch 8 0", "argument --batch: expected an integer of at least 1, got 0"),
        ("--sizes 64 -32", "argument --sizes: expected an integer from 1 to 16384, got -32"),
        ("--rounds 0", "argument --rounds: expected an integer of at least 1, got 0"),
        ("--threads 0", "argument --threads: expected an integer from 1 to 1024, got 0"),
        ("--seconds -1", "argument --seconds: expected a number of at least 0, got -1"),
    ],
)
def test_bench_rejects_invalid_arguments(capsys, arguments, message):
    code, _, err = run(capsys, *f"bench svit_nano --sizes 32 --device cpu {arguments}".split())
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("unexpected 'stems'", "unexpected 'stems'. Correct or remove it in --set."),
        ("unexpected 'stems'. Did you mean 'stem'?", "Did you mean 'stem'? Correct or remove it in --set."),
    ],
)
def test_wrong_model_options_name_the_flag(reason, expected):
    with pytest.raises(UsageError) as error, model_options("svit_nano", {"stems": 1}):
        raise TypeError(reason)
    assert str(error.value).startswith("svit_nano cannot be created with stems=1: unexpected 'stems'")
    assert str(error.value).endswith(expected)
