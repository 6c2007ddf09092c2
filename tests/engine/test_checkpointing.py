"""Killed, interrupted and distributed runs end with the weights of an uninterrupted one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from saccade.engine.checkpointing import Checkpointer
from saccade.engine.tasks.classify import ClassificationModule
from saccade.engine.train import assemble, train
from tests.engine.runs import RANDOM, arguments, recipe, rows

ROOT = Path(__file__).parents[2]
LONG = ["epochs=4", "trainer.save_every=2", *RANDOM]  # 12 steps, validation every 3


def command_line(out: Path, *changes: str) -> list[str]:
    return [*arguments(*changes), "--out", str(out), "--resume", "--quiet"]


def run_python(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.run(
        [sys.executable, *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        start_new_session=True,  # a process group of its own
    )


def run_with_signal(name: str, point: str, step: int, out: Path, *changes: str) -> subprocess.CompletedProcess[str]:
    """Run `saccade train` in a process that sends its process group a signal at an exact point."""
    return run_python("-m", "tests.engine.signal_run", name, point, str(step), *command_line(out, *changes))


def load_checkpoint(out: Path) -> dict:
    return torch.load(out / "last.ckpt", weights_only=True)


def assert_same_weights(first: Path, second: Path) -> None:
    for name in ("last", "best"):
        a, b = load_file(first / f"{name}.safetensors"), load_file(second / f"{name}.safetensors")
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a), f"{name} weights differ"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return train(recipe(*LONG), tmp_path_factory.mktemp("uninterrupted"), progress=False)


@pytest.mark.parametrize(
    ("point", "step", "saved"),
    [
        ("step", 7, 6),  # between the checkpoints of steps 6 and 8
        ("validation", 9, 8),  # step 9 has no checkpoint before its validation
        ("write", 8, 6),  # the new checkpoint is written but not yet in place
    ],
)
def test_killed_run_ends_with_same_weights(point, step, saved, uninterrupted, tmp_path):
    """SIGKILL: data order, schedule, EMA, random numbers and optimizer continue bit by bit."""
    killed = run_with_signal("SIGKILL", point, step, tmp_path, *LONG)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert load_checkpoint(tmp_path)["saccade"]["steps"] == saved
    resumed = train(recipe(*LONG), tmp_path, resume=True, progress=False)
    assert resumed.result["steps"] == uninterrupted.result["steps"] == 12
    assert_same_weights(uninterrupted.out, tmp_path)
    assert [row["step"] for row in rows(tmp_path)] == [row["step"] for row in rows(uninterrupted.out)]


class Crash(Exception):
    pass


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("save", [2, 3, 4])
def test_crash_at_checkpoint_loses_no_log_row(save, after, tmp_path, monkeypatch):
    """Checkpoints of this run: at steps 2, 3 (after its validation), 4, 6 (after its validation) and so on."""
    changes = ["epochs=3", "trainer.save_every=2", "trainer.log_every=1"]
    train(recipe(*changes), tmp_path / "uninterrupted", progress=False)
    saves, original = [], Checkpointer.save

    def crash(*args):
        saves.append(1)
        if len(saves) == save and not after:
            raise Crash
        original(*args)
        if len(saves) == save:
            raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(Checkpointer, "save", crash)
        with pytest.raises(Crash):
            train(recipe(*changes), tmp_path / "crashed", progress=False)
    train(recipe(*changes), tmp_path / "crashed", resume=True, progress=False)
    expected, resumed = (
        [set(row) | {row["step"]} for row in nonempty_cells(tmp_path / name)] for name in ("uninterrupted", "crashed")
    )
    assert resumed == expected


@pytest.mark.parametrize("during", [False, True])
@pytest.mark.parametrize("step", [3, 9])
def test_interrupted_validation_is_repeated_on_resume(step, during, tmp_path, monkeypatch):
    """Stopped by a signal in the step before the validation, or inside it; in the latter case twice."""
    changes = ["epochs=3", "trainer.log_every=2", "data.val_fraction=0.5"]
    train(recipe(*changes), tmp_path / "uninterrupted", progress=False)
    name = "update_metrics" if during else "optimizer_step"
    original, signals = getattr(ClassificationModule, name), []

    def stop(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if self.clock.steps == step:
            signals.append(step)
            signal.raise_signal(signal.SIGUSR1)

    with monkeypatch.context() as patched:
        patched.setattr(ClassificationModule, name, stop)
        for resume in (False, True) if during else (False,):
            stopped = train(recipe(*changes), tmp_path / "stopped", resume=resume, progress=False)
            assert (stopped.stopped, stopped.result["step"]) == ("SIGUSR1", step)
    assert len(signals) == 1 + during
    assert load_checkpoint(tmp_path / "stopped")["saccade"]["validation_pending"]
    result = train(recipe(*changes), tmp_path / "stopped", resume=True, progress=False).result
    assert [row["step"] for row in rows(tmp_path / "stopped") if row["val_top1"]] == ["3", "6", "9"]
    stopped, expected = (nonempty_cells(tmp_path / name, timed=False) for name in ("stopped", "uninterrupted"))
    assert stopped == expected
    assert_same_weights(tmp_path / "uninterrupted", tmp_path / "stopped")
    assert result["steps"] == 9
    assert not load_checkpoint(tmp_path / "stopped")["saccade"]["validation_pending"]


def nonempty_cells(out: Path, timed: bool = True) -> list[dict[str, str]]:
    """Log rows without empty cells and without throughput, which needs two rows of one process."""
    left_out = ("images_per_s",) if timed else ("images_per_s", "seconds")
    return [{key: cell for key, cell in row.items() if cell and key not in left_out} for row in rows(out)]


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_signal_to_process_group_saves_and_stops(name, tmp_path):
    """The signal also reaches the loader processes, which ignore it; the resumed run ends with the same weights."""
    changes = ["data.cache=false", "data.workers=2"]
    stopped = run_with_signal(name, "step", 4, tmp_path / "stopped", *changes)
    assert stopped.returncode == 1
    assert "worker" not in stopped.stderr
    hint = f"Continue with: saccade train --resume --out {tmp_path / 'stopped'}"
    assert f"stopped by {name}; the checkpoint is saved. {hint}" in stopped.stderr
    checkpoint = load_checkpoint(tmp_path / "stopped")
    assert checkpoint["saccade"]["steps"] == 4
    assert checkpoint.keys() >= {"state_dict", "optimizer_states", "callbacks", "saccade"}
    train(recipe("data.cache=false"), tmp_path / "stopped", resume=True, progress=False)
    train(recipe("data.cache=false"), tmp_path / "uninterrupted", progress=False)
    assert_same_weights(tmp_path / "uninterrupted", tmp_path / "stopped")


def test_second_sigint_stops_immediately(tmp_path, monkeypatch):
    original = ClassificationModule.prepare

    def interrupt(self, batch):
        if self.clock.steps == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return original(self, batch)

    monkeypatch.setattr(ClassificationModule, "prepare", interrupt)
    with pytest.raises(SystemExit):  # Lightning turns KeyboardInterrupt into an exit
        train(recipe(), tmp_path, progress=False)
    assert not (tmp_path / "last.ckpt").exists()


def test_checkpoint_with_other_objects_is_refused(uninterrupted, tmp_path):
    """Resuming unpickles tensors and plain values only (weights_only=True)."""
    checkpoint = load_checkpoint(uninterrupted.out)
    torch.save(checkpoint | {"extra": recipe()}, tmp_path / "last.ckpt")
    with pytest.raises(Exception, match="Weights only load failed"):
        train(recipe(*LONG), tmp_path, resume=True, progress=False)


def test_two_processes_match_one_with_full_batch(tmp_path):
    """gloo: the same images, gradients and weights; batch norms are frozen, as their statistics are per process."""
    changes = ["augment.flip=0.5", "augment.crop=pad", "ema.decay=0.9", "optimizer.name=sgd", "optimizer.lr=0.1",
               "data.cache=false", "regularize.freeze_norm=true"]  # fmt: skip
    one = train(recipe(*changes), tmp_path / "one", progress=False)
    distributed = ["trainer.devices=2", "trainer.strategy=ddp"]
    done = run_python("-m", "saccade.cli", "train", *command_line(tmp_path / "two", *changes, *distributed))
    assert done.returncode == 0, done.stderr
    two = json.loads((tmp_path / "two/result.json").read_text())
    assert two["final"]["top1"] == one.result["final"]["top1"]
    assert two["final"]["loss"] == pytest.approx(one.result["final"]["loss"], abs=1e-4)
    a, b = load_file(tmp_path / "one/last.safetensors"), load_file(tmp_path / "two/last.safetensors")
    initial = assemble(recipe(*changes)).model.state_dict()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-5, rtol=1e-4)
    change = max(float((a[name] - initial[name]).abs().max()) for name in a if name.endswith("weight"))
    assert change > 1e-3, "the weights must have changed"


@pytest.mark.slow
def test_two_processes_end_timed_run_together(tmp_path):
    timed = ["epochs=100000", "trainer.max_minutes=0.3", "trainer.val_every=100000"]
    distributed = ["trainer.devices=2", "trainer.strategy=ddp"]
    done = run_python("-m", "saccade.cli", "train", *command_line(tmp_path, *timed, *distributed))
    assert done.returncode == 0, done.stderr
    steps = json.loads((tmp_path / "result.json").read_text())["steps"]
    assert load_checkpoint(tmp_path)["saccade"]["steps"] == steps >= 1
