"""Killed, interrupted, spread over processes: the same weights in the end."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from saccade.engine.checkpointing import Checkpointer
from saccade.engine.tasks.classify import ClassificationModule
from saccade.engine.train import train
from tests.engine.runs import RANDOM, arguments, recipe, rows

ROOT = Path(__file__).parents[2]


def start(out: Path, *changes: str, **environment: str) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "saccade.cli",
        "train",
        *arguments(*changes),
        "--out",
        str(out),
        "--resume",
        "--quiet",
    ]
    own = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())} | environment
    return subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(process: subprocess.Popen, path: Path) -> None:
    """Until the running process has written `path`; it must not end before."""
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def assert_same_weights(first: Path, second: Path) -> None:
    for name in ("last", "best"):
        a, b = load_file(first / f"{name}.safetensors"), load_file(second / f"{name}.safetensors")
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a), f"{name} weights differ"


LONG = ["epochs=12", "trainer.save_every=2", *RANDOM]


def test_a_killed_run_ends_as_one_that_was_not(tmp_path):
    """SIGKILL at a random moment; data order, schedule, average, dice and optimiser go on, bit by bit."""
    whole = train(recipe(*LONG), tmp_path / "whole", progress=False)
    process = start(tmp_path / "killed", *LONG)
    wait_for(process, tmp_path / "killed/last.ckpt")
    time.sleep(random.uniform(0, 0.4))
    process.kill()
    assert process.wait() == -signal.SIGKILL
    at = torch.load(tmp_path / "killed/last.ckpt", weights_only=True)["saccade"]["steps"]
    assert 0 < at < 36, "killed on the way"
    resumed = train(recipe(*LONG), tmp_path / "killed", resume=True, progress=False)
    assert resumed.result["steps"] == whole.result["steps"] == 36
    assert_same_weights(tmp_path / "whole", tmp_path / "killed")
    lines = [[row["step"] for row in rows(tmp_path / name)] for name in ("whole", "killed")]
    assert lines[0] == lines[1], "the log has every update once"


class Crash(Exception):
    pass


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("at", [2, 3, 4])
def test_a_crash_right_before_or_behind_a_state_loses_no_row_of_the_log(at, late, tmp_path, monkeypatch):
    """States of this run: at updates 2, 3 (behind its validation), 4, 6 (likewise) and so on."""
    changes = ["epochs=3", "trainer.save_every=2", "trainer.log_every=1"]
    train(recipe(*changes), tmp_path / "whole", progress=False)
    saves, save = [], Checkpointer.save

    def crash(*given):
        saves.append(1)
        if len(saves) == at and not late:
            raise Crash
        save(*given)
        if len(saves) == at:
            raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(Checkpointer, "save", crash)
        with pytest.raises(Crash):
            train(recipe(*changes), tmp_path / "crashed", progress=False)
    train(recipe(*changes), tmp_path / "crashed", resume=True, progress=False)
    whole, crashed = ([set(row) | {row["step"]} for row in filled(tmp_path / name)] for name in ("whole", "crashed"))
    assert crashed == whole


@pytest.mark.parametrize("during", [False, True])
@pytest.mark.parametrize("at", [3, 9])
def test_a_validation_that_was_cut_off_comes_first_when_the_run_goes_on(at, during, tmp_path, monkeypatch):
    """Stopped by a signal in the update before it, or inside it; the second run is stopped there once more."""
    changes = ["epochs=3", "trainer.log_every=2", "data.val_fraction=0.5"]
    train(recipe(*changes), tmp_path / "whole", progress=False)
    name = "validate" if during else "optimizer_step"
    ordinary, seen = getattr(ClassificationModule, name), []

    def stop(self, *given, **named):
        ordinary(self, *given, **named)
        if self.clock.steps == at:
            seen.append(at)
            signal.raise_signal(signal.SIGUSR1)

    with monkeypatch.context() as patched:
        patched.setattr(ClassificationModule, name, stop)
        for resume in (False, True) if during else (False,):
            stopped = train(recipe(*changes), tmp_path / "stopped", resume=resume, progress=False)
            assert (stopped.stopped, stopped.result["step"]) == ("SIGUSR1", at)
    assert len(seen) == 1 + during
    assert torch.load(tmp_path / "stopped/last.ckpt", weights_only=True)["saccade"]["validation_pending"]
    result = train(recipe(*changes), tmp_path / "stopped", resume=True, progress=False).result
    assert [row["step"] for row in rows(tmp_path / "stopped") if row["val_top1"]] == ["3", "6", "9"]
    assert filled(tmp_path / "stopped", timed=False) == filled(tmp_path / "whole", timed=False)
    assert_same_weights(tmp_path / "whole", tmp_path / "stopped")
    assert result["steps"] == 9
    assert not torch.load(tmp_path / "stopped/last.ckpt", weights_only=True)["saccade"]["validation_pending"]


def filled(out: Path, timed: bool = True) -> list[dict[str, str]]:
    """Rows of a log without their empty cells, and without speeds, which need two rows of one process."""
    left_out = ("images_per_s",) if timed else ("images_per_s", "seconds")
    return [{key: cell for key, cell in row.items() if cell and key not in left_out} for row in rows(out)]


def test_sigterm_saves_and_stops_and_the_run_goes_on(tmp_path):
    process = start(tmp_path / "run", "epochs=400")
    wait_for(process, tmp_path / "run/last.ckpt")
    process.terminate()
    _, words = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "stopped by SIGTERM; the checkpoint is saved. Continue with: saccade train --resume" in words
    state = torch.load(tmp_path / "run/last.ckpt", weights_only=True)
    assert state["saccade"]["steps"] < 1200
    assert set(state) >= {"state_dict", "optimizer_states", "callbacks", "saccade"}


@pytest.mark.slow
def test_ctrl_c_saves_and_stops(tmp_path):
    process = start(tmp_path / "run", "epochs=400")
    wait_for(process, tmp_path / "run/last.ckpt")
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=60)
    assert (process.returncode, "stopped by SIGINT" in words) == (1, True)


def test_two_processes_take_the_steps_of_one_with_the_doubled_batch(tmp_path):
    """gloo, synchronised batch norm: the same pictures, the same gradients, the same weights."""
    plain = [
        "augment.flip=0.5",
        "augment.crop=pad",
        "ema.decay=0.9",
        "optimizer.name=sgd",
        "optimizer.lr=0.1",
        "data.cache=false",
    ]
    one = train(recipe(*plain), tmp_path / "one", progress=False)
    process = start(
        tmp_path / "two", *plain, "trainer.devices=2", "trainer.strategy=ddp", "trainer.sync_batchnorm=true"
    )
    _, words = process.communicate(timeout=300)
    assert process.returncode == 0, words
    two = json.loads((tmp_path / "two/result.json").read_text())
    assert two["final"]["top1"] == one.result["final"]["top1"]
    assert two["final"]["loss"] == pytest.approx(one.result["final"]["loss"], abs=1e-4)
    a, b = load_file(tmp_path / "one/last.safetensors"), load_file(tmp_path / "two/last.safetensors")
    start_weights = recipe_weights(plain)
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-5, rtol=1e-4)
    moved = max(float((a[name] - start_weights[name]).abs().max()) for name in a if name.endswith("weight"))
    assert moved > 1e-3, "and they did move"


@pytest.mark.slow
def test_two_processes_end_a_timed_run_together(tmp_path):
    timed = ["epochs=100000", "trainer.max_minutes=0.3", "trainer.val_every=100000"]
    process = start(tmp_path / "run", *timed, "trainer.devices=2", "trainer.strategy=ddp")
    _, words = process.communicate(timeout=240)
    assert process.returncode == 0, words
    assert json.loads((tmp_path / "run/result.json").read_text())["steps"] > 10


def recipe_weights(changes: list[str]) -> dict[str, torch.Tensor]:
    from saccade.engine.train import assemble

    return assemble(recipe(*changes))[0].state_dict()
