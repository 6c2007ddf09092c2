"""docs/results.md is generated from docs/results/*.json."""

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "tools/make_results.py"


def load():
    spec = spec_from_file_location("make_results", SCRIPT)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_results_page_is_up_to_date():
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_run_becomes_a_row_without_machine_paths(tmp_path, monkeypatch):
    script = load()
    monkeypatch.setattr(script, "DOCS", tmp_path)
    result = {
        "model": "svit_nano", "data": "cifar10", "classes": 10, "train_images": 50000, "val_images": 10000,
        "parameters": 2_489_274, "multiply_adds": 158_100_480, "image_size": 128, "epochs": 150, "minutes": 8.5,
        "final": {"top1": 95.123, "top5": 99.8, "calibration": 1.2}, "best": {"top1": 95.2, "step": 9},
        "train_images_per_s": 20000.4, "loader_images_per_s": None,
        "command": "saccade train r.yaml --data /home/me/cifar10 --out /home/me/x/first",
        "machine": {"device": "NVIDIA H200", "torch": "2.11.0", "date": "2026-01-01", "commit": "abc"},
        "recipe": {"data": {"path": "/home/me/cifar10", "val_path": None}, "model": {"checkpoint": None},
                   "distill": {"teacher": None}},
    }  # fmt: skip
    (tmp_path / "run").mkdir()
    (tmp_path / "run/result.json").write_text(json.dumps(result))
    added = script.add(tmp_path / "run")
    assert "/home/me" not in added.read_text()
    page = script.page()
    assert "| `svit_nano` | 2.49 | 158 | 128 | **95.12** | 95.20 |" in page
    assert (
        "NVIDIA H200, torch 2.11.0, 2026-01-01, commit abc: `saccade train r.yaml --data cifar10 --out runs/first`"
        in page
    )


def test_distilled_run_gets_its_own_row(tmp_path, monkeypatch):
    """The same model on the same data: two files and two rows, each with its own command."""
    script = load()
    monkeypatch.setattr(script, "DOCS", tmp_path)
    added = []
    for name, top1, teacher in (("first", 28.5, None), ("second", 46.84, "/elsewhere/weights/teacher.safetensors")):
        checkpoint = "/elsewhere/weights/first.safetensors" if teacher else None
        options = f" --set distill.teacher={teacher} --set model.checkpoint={checkpoint}" if teacher else ""
        result = {
            "model": "svit_nano", "data": "tiny", "classes": 200, "train_images": 40000, "val_images": 5000,
            "parameters": 2_586_744, "multiply_adds": 158_197_760, "image_size": 128, "epochs": 63, "minutes": 8.8,
            "final": {"top1": top1, "top5": 72.8, "calibration": 20.0}, "best": {"top1": top1, "step": 9},
            "train_images_per_s": 6972.4, "loader_images_per_s": None,
            "command": f"saccade train r.yaml --data sets/tiny --out /elsewhere/runs/{name}{options}",
            "machine": {"device": "NVIDIA H200", "torch": "2.11.0", "date": "2026-01-01", "commit": "abc"},
            "recipe": {"data": {"path": "sets/tiny", "val_path": None}, "model": {"checkpoint": checkpoint},
                       "distill": {"teacher": teacher}},
        }  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps(result))
        added.append(script.add(tmp_path / name, "two runs on one GPU"))
    assert [path.name for path in added] == ["tiny_svit_nano.json", "tiny_svit_nano_distilled.json"]
    assert all("/tmp" not in path.read_text() and "carry" not in path.read_text() for path in added)
    assert script.add(tmp_path / "first", variant="9 epochs").name == "tiny_svit_nano_9_epochs.json"
    page = script.page()
    assert "| `svit_nano` | 2.59 | 158 | 128 | **28.50** |" in page
    assert "| `svit_nano`, 9 epochs | 2.59 | 158 | 128 | **28.50** |" in page
    assert "| `svit_nano`, distilled | 2.59 | 158 | 128 | **46.84** |" in page
    assert "(two runs on one GPU): `saccade train r.yaml --data tiny --out runs/first`" in page
    assert (
        "- `svit_nano`, distilled: NVIDIA H200, torch 2.11.0, 2026-01-01, commit abc (two runs on one GPU): `saccade "
        "train r.yaml --data tiny --out runs/second --set distill.teacher=teacher.safetensors "
        "--set model.checkpoint=first.safetensors`" in page
    )


def test_each_task_of_a_data_set_has_a_table(tmp_path, monkeypatch):
    """Boxes without masks, and video classification; the commit is omitted if unknown."""
    script = load()
    monkeypatch.setattr(script, "DOCS", tmp_path)
    common = {
        "data": "scenes", "classes": 10, "train_images": 2048, "val_images": 256, "parameters": 3e6,
        "multiply_adds": 1e8, "image_size": 256, "epochs": 3, "minutes": 2.5, "train_images_per_s": None,
        "loader_images_per_s": None, "command": "saccade train",
        "machine": {"device": "cpu", "torch": "2.11.0", "date": "2026-01-01", "commit": None},
    }  # fmt: skip
    boxes = {"box_ap": 61.23, "box_ap50": 91.0, "box_ap75": 70.0}
    detector = {
        "model": "sparseformer_nano+sparse",
        "task": "detection",
        "score": "box_ap",
        "final": boxes,
        "best": boxes,
    }
    accuracy = {"top1": 90.0, "top5": 99.0, "calibration": 1.0}
    video = {"model": "video_sparseformer_nano", "task": "video", "score": "top1", "final": accuracy, "best": accuracy}
    (tmp_path / "results").mkdir()
    for number, result in enumerate((detector, video)):
        (tmp_path / f"results/{number}.json").write_text(json.dumps(common | result))
    page = script.page()
    assert "## scenes, detection" in page
    assert "| `sparseformer_nano+sparse` | 3.00 | 256 | 61.2 | 91.0 | 70.0 | – | – | – | 61.2 |" in page
    assert "## scenes, classification" in page
    assert "commit" not in page.partition("##")[2]
