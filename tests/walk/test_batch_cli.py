"""`saccade predict … --format parquet`: what selects it, its files, summary and refusals."""

import json

import pyarrow.parquet as pq
import pytest

from saccade.cli import main
from saccade.data.synthetic.photos import photo_paths
from tests.weights.folder import make_run

PHOTO = str(photo_paths()["cat"])


def run(capsys, *arguments):
    """Return exit code, stdout, stderr."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), "vt_nano")


def test_task_writes_parquet_and_json_is_the_summary(capsys, checkpoint, tmp_path):
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    out = tmp_path / "out"
    arguments = ("predict", checkpoint, PHOTO, tmp_path / "bad.jpg", "--task", "embed", "--out", out, "--tokens")
    code, printed, err = run(capsys, *arguments, "--json")
    assert code == 0, err
    document = json.loads(printed)
    assert {key: document[key] for key in ("rows", "errors", "predicted", "engine", "out")} == {
        "rows": 2, "errors": 1, "predicted": 2, "engine": "local", "out": str(out),
    }  # fmt: skip
    rows = pq.read_table(out).to_pylist()
    assert [row["name"] for row in rows] == [PHOTO, str(tmp_path / "bad.jpg")]
    assert len(rows[0]["embedding"]) > 8
    assert len(rows[0]["token_areas"]) == len(rows[0]["token_centres"]) > 1
    assert "not a readable image" in rows[1]["error"]
    code, printed, _ = run(capsys, *arguments)
    assert code == 0
    assert "2 rows, 1 with an error; 0 predicted now" in printed


def test_format_parquet_classifies_and_files_is_the_default(capsys, checkpoint, tmp_path):
    code, printed, _ = run(capsys, "predict", checkpoint, PHOTO, "--format", "parquet", "--top", 2, "--out", tmp_path)
    assert code == 0
    assert "1 rows, 0 with an error; 1 predicted now" in printed
    (row,) = pq.read_table(tmp_path).to_pylist()
    assert len(row["classes"]) == 2
    code, printed, _ = run(capsys, "predict", checkpoint, PHOTO, "--top", 2, "--json")
    (prediction,) = json.loads(printed)["predictions"]
    assert prediction["classes"][0]["name"] == row["label"]
    assert prediction["classes"][0]["probability"] == pytest.approx(row["probability"], rel=1e-4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--task", "embed", "--format", "files"], "--task writes Parquet files. Remove it, or --format files."),
        (["--part-rows", "5", "--format", "files"], "--part-rows writes Parquet files"),
        (["--format", "parquet", "--csv"], "--csv is for --format files"),
        (["--format", "parquet", "--embed"], "Use --task embed"),
        (["--task", "detect"], "expected task classify or embed for classification, got detect"),
        (["--task", "classify", "--actors", "2"], "actors applies to engine ray, not to local"),
        (["--engine", "ray", "--workers", "2"], "workers applies to engine local, not to ray"),
    ],
)
def test_flag_that_cannot_be_honoured_is_refused(capsys, checkpoint, tmp_path, flags, message):
    code, out, err = run(capsys, "predict", checkpoint, PHOTO, "--out", tmp_path / "out", *flags)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_parquet_needs_a_folder_and_a_checkpoint(capsys, checkpoint, tmp_path):
    code, _, err = run(capsys, "predict", checkpoint, PHOTO, "--task", "embed")
    assert (code, "expected --out DIR" in err) == (2, True)
    code, _, err = run(capsys, "predict", "model.onnx", PHOTO, "--task", "classify", "--out", tmp_path)
    assert (code, "needs a checkpoint, got a .onnx file" in err) == (2, True)
