"""`saccade export` and `saccade predict model.onnx`: files, exit codes, messages, no torch."""

import json
import re

import pytest

from saccade.cli import main
from saccade.data.synthetic.photos import photo_paths
from saccade.inference import export_check
from tests.torch_free import run_without_torch
from tests.weights.folder import make_run

pytest.importorskip("onnx", reason="needs saccade[export]")
pytest.importorskip("onnxscript", reason="needs saccade[export]")
pytest.importorskip("onnxruntime", reason="needs saccade[export]")

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
    folder = tmp_path_factory.mktemp("run")
    return make_run(folder, "vt_nano")


@pytest.fixture(scope="module")
def onnx_file(checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("onnx") / "vt.onnx"
    assert main(["export", str(checkpoint), "--out", str(path)]) == 0
    return path


def test_export_checks_the_file_and_prints_the_largest_difference(capsys, checkpoint, tmp_path):
    path = tmp_path / "new" / "vt.onnx"
    code, out, err = run(capsys, "export", checkpoint, "--check", "--out", path)
    assert code == 0, err
    assert re.search(r"agrees: largest difference \S+, \S+ of the largest output \(tolerance 1e-03\)", out)
    assert "images (batch, 3, height, width) -> logits" in out
    assert [file.name for file in path.parent.iterdir()] == ["vt.onnx"]


def test_export_json_has_the_comparisons(capsys, checkpoint, tmp_path):
    path = tmp_path / "vt.pt2"
    code, out, _ = run(capsys, "export", checkpoint, "--check", "--json", "--out", path)
    document = json.loads(out)
    assert code == 0
    assert document["format"] == "pt2"
    assert document["bytes"] == path.stat().st_size
    assert document["check"]["agrees"] is True
    assert {row["batch"] for row in document["check"]["rows"]} == {1, 3, 4}
    assert len({(row["height"], row["width"]) for row in document["check"]["rows"]}) == 3
    assert document["check"]["largest_difference"] <= 1e-3
    assert {"torch", "onnxruntime", "date"} <= set(document["check"]["versions"])


def test_mismatch_is_exit_code_1(capsys, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setitem(export_check.TOLERANCE, "float32", 1e-12)
    code, out, _ = run(capsys, "export", checkpoint, "--check", "--out", tmp_path / "vt.onnx", "--dynamic", "none")
    assert code == 1
    assert "differs: largest difference" in out


def test_registered_name_without_weights_is_exported_with_a_note(capsys, tmp_path):
    path = tmp_path / "vt.pt2"
    code, out, err = run(capsys, "export", "vt_nano", "--set", "num_classes=3", "--dynamic", "batch", "--out", path)
    assert code == 0
    assert "images (batch, 3, 64, 64)" in out
    code, _, err = run(capsys, "export", "vt_nano", "--dynamic", "none", "--size", 80, "--out", path)
    assert code == 0
    assert "randomly initialised" in err


DETECTOR_OPTIONS = ("num_classes=3", "min_size=64", "max_size=96", "width=8", "box_score_thresh=0.2")


@pytest.mark.slow
def test_detector_by_name_is_exported_checked_and_predicts(capsys, tmp_path):
    flags = [word for option in DETECTOR_OPTIONS for word in ("--set", option)]
    path = tmp_path / "detector.onnx"
    code, out, err = run(capsys, "export", "vt_nano+mask_rcnn", *flags, "--check", "--json", "--out", path)
    document = json.loads(out)
    check = document["check"]
    assert code == (0 if check["agrees"] else 1), err  # random weights: objects of equal scores may differ
    graphs = [row for row in check["rows"] if row["inputs"] in ("proposals", "regions", "masks")]
    assert len(graphs) == 27
    assert max(row["relative"] for row in graphs) < 1e-4
    assert "vt_nano+mask_rcnn is randomly initialised" in err
    assert document["files"] == [str(tmp_path / f"detector{part}.onnx") for part in ("", ".regions", ".masks")]
    code, out, err = run(capsys, "predict", path, PHOTO, "--json", "--threshold", "0.2")
    assert code == 0, err
    assert all("counts" in entry["segmentation"] for entry in json.loads(out)["predictions"][0]["objects"])


def test_detector_by_name_is_refused_as_pt2(capsys, tmp_path):
    flags = [word for option in DETECTOR_OPTIONS for word in ("--set", option)]
    code, _, err = run(capsys, "export", "vt_nano+cascade_mask_rcnn", *flags, "--out", tmp_path / "detector.pt2")
    assert code == 2
    assert "are exported to onnx, got format pt2" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--out", "model.txt"], "expected --out to end in .onnx or .pt2"),
        (["--out", "model.onnx", "--format", "pt2"], "expected --out to end in"),
        (["--out", "model.onnx", "--dynamic", "depth"], "got depth"),
        (["--out", "model.onnx", "--size", "64"], "--size fixes height and width"),
        (
            ["--out", "model.onnx", "--dynamic", "none", "--size", "0"],
            "argument --size: expected an integer from 1 to 16384, got 0.",
        ),
        (["--out", "model.onnx", "--device", "cuda"], "export runs on the CPU"),
        (["--out", "model.onnx", "--set", "num_classes=3"], "--set builds a model by name"),
    ],
)
def test_flag_that_cannot_be_honoured_is_refused(capsys, checkpoint, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "export", checkpoint, *flags)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_wrong_usage_is_exit_code_2(capsys, checkpoint, tmp_path):
    assert run(capsys, "export", checkpoint)[0] == 2
    assert run(capsys, "export", checkpoint, "--out", tmp_path / "a.onnx", "--dtype", "int4")[0] == 2


def test_predict_of_a_file_imports_no_torch(onnx_file, tmp_path):
    """In a process whose program name is `saccade`, as the console script starts it."""
    arguments = ["predict", str(onnx_file), PHOTO, "--top", "2", "--out", str(tmp_path)]
    (prediction,) = run_without_torch(arguments)
    assert "cat.jpg: " in prediction
    (entry,) = json.loads((tmp_path / "predictions.json").read_text())["predictions"]
    assert len(entry["classes"]) == 2


def test_predict_of_a_file_skips_bad_images_and_lists_folders(capsys, onnx_file, tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"not an image")
    (tmp_path / "b.jpg").write_bytes(photo_paths()["cat"].read_bytes())
    code, out, err = run(capsys, "predict", onnx_file, tmp_path, "--json")
    document = json.loads(out)
    assert code == 0
    assert [entry["image"] for entry in document["predictions"]] == [str(tmp_path / "b.jpg")]
    assert len(document["unreadable"]) == 1
    assert "skipped" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--precision", "float16"], "--precision float16 is for checkpoints"),
        (["--device", "cuda"], "runs on the CPU"),
        (["--threshold", "0.3"], "threshold applies to detection"),
    ],
)
def test_predict_of_a_file_refuses_flags_it_cannot_honour(capsys, onnx_file, flags, message):
    code, _, err = run(capsys, "predict", onnx_file, PHOTO, *flags)
    assert code == 2
    assert message in err
