"""One run by the worker: what is stored, divergence, continuation after a signal."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from saccade.engine.module import NonFiniteLoss
from saccade.reproduce import worker
from saccade.reproduce.claim import load_claims
from saccade.reproduce.plan import run_of
from saccade.reproduce.runner import STOPPED

TINY = ("epochs=2", "data.scenes=64", "data.image_size=32", "batch_size=16", "trainer.precision=32-true",
        "trainer.val_every=1", "data.workers=0")  # fmt: skip


def prepare(tmp_path: Path, claim: str = "svit-cpe", label: str = "none", parallel: int = 1, changes=TINY, **fields):
    run = run_of(load_claims()[claim]._replace(**fields), label, 1, changes, {"scenes": "scenes"})
    folder = tmp_path / "runs" / run.key
    folder.mkdir(parents=True)
    spec = {"key": run.key, "run": run.describe(), "data": "scenes", "device": "cpu", "parallel": parallel}
    spec |= {"parent": os.getppid(), "result": str(tmp_path / "results" / f"{run.key}.json")}
    (folder / "spec.json").write_text(json.dumps(spec))
    return folder, spec


def test_result_has_metrics_curve_cost_and_environment(tmp_path):
    folder, spec = prepare(tmp_path, parallel=3, exclusive=True)
    assert worker.main(folder) == 0
    result = json.loads(Path(spec["result"]).read_text())
    assert result["run"] == spec["run"]
    assert [row["epoch"] for row in result["curve"]] == [1.0, 2.0]
    assert result["metrics"]["top1"] == pytest.approx(result["curve"][-1]["val_top1"], abs=1e-3)
    assert result["metrics"]["gap"] == pytest.approx(
        result["metrics"]["train_top1"] - result["metrics"]["top1"], abs=1e-3
    )
    assert {"train_loss", "train_top1", "val_loss", "seconds"} <= set(result["curve"][0])
    assert (result["shared"], result["sessions"]) == (True, [{"parallel": 3, "device_gib_in_use": None}])
    assert result["recipe"]["model"]["kwargs"] == {"super_token": [8, 4, 1, 1], "position": "none", "ffn": "plain"}
    assert (result["recipe"]["seed"], result["recipe"]["epochs"], result["recipe"]["data"]["path"]) == (1, 2, "scenes")
    assert result["multiply_adds"] > 0
    assert result["latency_ms"] > 0
    assert result["machine"]["torch"]
    assert result["diverged"] is None


def test_diverged_run_is_a_result(tmp_path, monkeypatch):
    folder, spec = prepare(tmp_path)

    def diverge(recipe, out, **_):
        out.mkdir(parents=True)
        (out / "metrics.csv").write_text("step,epoch,train_loss,val_loss,val_top1\n4,1,2.0,,\n4,1,,2.1,12.5\n")
        raise NonFiniteLoss(f"the loss is nan at step 6. The last checkpoint is {out}/last.ckpt.")

    monkeypatch.setattr(worker, "train", diverge)
    assert worker.main(folder) == 0
    result = json.loads(Path(spec["result"]).read_text())
    assert result["metrics"] == {"loss": 2.1, "top1": 12.5}
    assert result["diverged"] == "the loss is nan at step 6. The last checkpoint is /train/last.ckpt."


def test_session_with_other_processes_on_the_gpu_counts_as_shared():
    assert not worker.is_shared([{"parallel": 1, "device_gib_in_use": 0.6}])
    assert worker.is_shared([{"parallel": 1, "device_gib_in_use": 20.0}])
    assert worker.is_shared([{"parallel": 1, "device_gib_in_use": None}, {"parallel": 2, "device_gib_in_use": None}])


def start(folder: Path) -> subprocess.Popen:
    spec = json.loads((folder / "spec.json").read_text()) | {"parent": os.getpid()}
    (folder / "spec.json").write_text(json.dumps(spec))
    with open(folder / "log.txt", "ab") as log:
        return subprocess.Popen([sys.executable, "-m", "saccade.reproduce.worker", str(folder)], stderr=log, stdout=log)


def wait_for(condition, process: subprocess.Popen) -> None:
    while not condition() and process.poll() is None:
        threading.Event().wait(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_run_killed_half_way_continues_to_the_same_result(tmp_path, number):
    changes = (*(change for change in TINY if not change.startswith("epochs")), "epochs=12")
    uninterrupted, spec = prepare(tmp_path / "uninterrupted", changes=changes)
    assert start(uninterrupted).wait() == 0
    expected = json.loads(Path(spec["result"]).read_text())
    folder, spec = prepare(tmp_path / "stopped", changes=changes)
    process = start(folder)
    wait_for(lambda: (folder / "train" / "last.ckpt").exists(), process)
    process.send_signal(number)
    assert process.wait() == (STOPPED if number == signal.SIGTERM else -signal.SIGKILL)
    assert not Path(spec["result"]).exists()
    assert start(folder).wait() == 0
    result = json.loads(Path(spec["result"]).read_text())
    assert result["metrics"] == expected["metrics"]
    assert [row["val_loss"] for row in result["curve"]] == [row["val_loss"] for row in expected["curve"]]
    assert len(result["sessions"]) == 2


@pytest.mark.slow
def test_worker_stops_with_the_process_that_started_it(tmp_path):
    changes = (*(change for change in TINY if not change.startswith("epochs")), "epochs=4000")
    folder, _ = prepare(tmp_path, changes=changes)
    code = (
        "import json, os, subprocess, sys; from pathlib import Path; folder = Path(sys.argv[1]);"
        "file = folder / 'spec.json'; spec = json.loads(file.read_text()) | {'parent': os.getpid()};"
        "file.write_text(json.dumps(spec));"
        "process = subprocess.Popen([sys.executable, '-m', 'saccade.reproduce.worker', str(folder)]);"
        "print(process.pid, flush=True); process.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    pid = int(parent.stdout.readline())
    wait_for(lambda: (folder / "train" / "last.ckpt").exists(), parent)
    parent.kill()
    parent.wait()
    end = time.monotonic() + 120
    while Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < end
        threading.Event().wait(0.1)
