"""One run by the worker: what is stored, divergence, continuation after a signal."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade.data import Scenes
from saccade.data.loader import UnreadableImages, decode_all
from saccade.data.sources.base import Subset, limited
from saccade.data.transforms.image import MemoryTransform
from saccade.engine.loaders import Sources
from saccade.engine.module import NonFiniteLoss
from saccade.reproduce import worker
from saccade.reproduce.claim import load_claims
from saccade.reproduce.plan import run_of
from saccade.reproduce.runner import STOPPED, Runner, run_worker
from saccade.tasks.evaluators import Evaluation

TINY = ("epochs=2", "data.scenes=64", "data.image_size=32", "batch_size=16", "trainer.precision=32-true",
        "trainer.val_every=1", "data.workers=0")  # fmt: skip


def prepare(tmp_path: Path, claim: str = "svit-cpe", label: str = "none", parallel: int = 1, changes=TINY, **fields):
    run = run_of(load_claims()[claim]._replace(**fields), label, 1, changes, {"scenes": "scenes"})
    folder = tmp_path / "runs" / run.key
    folder.mkdir(parents=True)
    spec = {"key": run.key, "run": run.describe(), "data": "scenes", "device": "cpu", "parallel": parallel}
    spec |= {"cache": str(tmp_path / "cache"), "started": time.time()}
    spec |= {"result": str(tmp_path / "results" / f"{run.key}.json")}
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
    assert list(result["seconds"]) == ["start", "data", "training", "evaluation"]
    assert result["recipe"]["data"]["cache_folder"] is None  # not a path of this machine
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 2
    assert not (folder / "train" / "report.html").exists()


@pytest.mark.parametrize("limit", [None, 40])
def test_training_top1_is_that_of_a_balanced_part(monkeypatch, limit):
    train = limited(Scenes(64, 32), limit)
    memory = decode_all(train, MemoryTransform(32), workers=0)
    memory = memory._replace(**{name: getattr(memory, name)[1:] for name in ("images", "labels", "indices")})
    evaluated = []

    class Module:
        sources = Sources(train, None, memory, None, UnreadableImages(0))
        eval_model = None

        def evaluate(self, *_):
            evaluated.append(self.sources.val_memory)
            return Evaluation({"top1": 25.0}, [], None, {})

    for count in (20, 1000):
        monkeypatch.setattr(worker, "TRAIN_IMAGES", count)
        module: Any = Module()
        assert worker.train_top1(module, "cpu") == 25.0
    part = limited(train, 20, 0)
    expected = [image for image in (part.indices if isinstance(part, Subset) else range(20)) if image]
    assert evaluated[0].indices.tolist() == expected  # image 0 could not be read
    assert torch.equal(evaluated[0].images, memory.images[torch.isin(memory.indices, evaluated[0].indices)])
    assert torch.equal(evaluated[1].indices, memory.indices)


def test_diverged_run_is_a_result(tmp_path, monkeypatch):
    folder, spec = prepare(tmp_path)

    def diverge(session):
        out = Path(session.module.out)
        (out / "metrics.csv").write_text("step,epoch,train_loss,val_loss,val_top1\n4,1,2.0,,\n4,1,,2.1,12.5\n")
        raise NonFiniteLoss(f"the loss is nan at step 6. The last checkpoint is {out}/last.ckpt.")

    monkeypatch.setattr(worker, "fit", diverge)
    assert worker.main(folder) == 0
    result = json.loads(Path(spec["result"]).read_text())
    assert result["metrics"] == {"loss": 2.1, "top1": 12.5}
    assert result["diverged"] == "the loss is nan at step 6. The last checkpoint is /train/last.ckpt."


def test_session_with_other_processes_on_the_gpu_counts_as_shared():
    assert not worker.is_shared([{"parallel": 1, "device_gib_in_use": 0.6}])
    assert worker.is_shared([{"parallel": 1, "device_gib_in_use": 20.0}])
    assert worker.is_shared([{"parallel": 1, "device_gib_in_use": None}, {"parallel": 2, "device_gib_in_use": None}])


def start(folder: Path) -> BaseProcess:
    process = multiprocessing.get_context("forkserver").Process(target=run_worker, args=(Runner.worker, folder, 1))
    process.start()
    return process


def wait_for(condition, process: BaseProcess) -> None:
    while not condition() and process.is_alive():
        process.join(0.02)


def end(process: BaseProcess) -> int | None:
    process.join()
    return process.exitcode


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_run_killed_half_way_continues_to_the_same_result(tmp_path, number):
    changes = (*(change for change in TINY if not change.startswith("epochs")), "epochs=12")
    uninterrupted, spec = prepare(tmp_path / "uninterrupted", changes=changes)
    assert end(start(uninterrupted)) == 0
    expected = json.loads(Path(spec["result"]).read_text())
    folder, spec = prepare(tmp_path / "stopped", changes=changes)
    process = start(folder)
    wait_for(lambda: (folder / "train" / "last.ckpt").exists(), process)
    assert process.pid
    os.kill(process.pid, number)
    assert end(process) == (STOPPED if number == signal.SIGTERM else -signal.SIGKILL)
    assert not Path(spec["result"]).exists()
    assert end(start(folder)) == 0
    result = json.loads(Path(spec["result"]).read_text())
    assert result["metrics"] == expected["metrics"]
    assert [row["val_loss"] for row in result["curve"]] == [row["val_loss"] for row in expected["curve"]]
    assert len(result["sessions"]) == 2


@pytest.mark.slow
def test_worker_stops_with_the_process_that_started_it(tmp_path):
    changes = (*(change for change in TINY if not change.startswith("epochs")), "epochs=4000")
    folder, _ = prepare(tmp_path, changes=changes)
    code = (
        "import multiprocessing, sys; from pathlib import Path; from saccade.reproduce.runner import run_worker;"
        "context = multiprocessing.get_context('forkserver');"
        "arguments = ('saccade.reproduce.worker', Path(sys.argv[1]), 1);"
        "process = context.Process(target=run_worker, args=arguments); process.start();"
        "print(process.pid, flush=True); process.join()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    pid = int(parent.stdout.readline())
    while not (folder / "train" / "last.ckpt").exists() and parent.poll() is None:
        threading.Event().wait(0.02)
    parent.kill()
    parent.wait()
    limit = time.monotonic() + 120
    while Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < limit
        threading.Event().wait(0.1)
