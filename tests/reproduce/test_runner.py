"""The runner: parallel processes, budget, interruption, failures, exclusive runs."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from saccade.reproduce.claim import Arm
from saccade.reproduce.plan import PlannedRun
from saccade.reproduce.runner import STOPPED, Runner, read_result


def planned(number: int, exclusive: bool = False, minutes: float | None = None, **behaviour) -> PlannedRun:
    recipe = {"trainer": {"max_minutes": minutes}}
    arm = Arm("svit_nano", "", {"number": number} | behaviour)
    return PlannedRun(arm, 0, "scenes", recipe, exclusive=exclusive, uses=(("claim", f"arm {number}"),))


@pytest.fixture
def make_runner(tmp_path, monkeypatch):
    monkeypatch.setattr(Runner, "worker", "tests.reproduce.fake_worker")
    monkeypatch.setattr(Runner, "preload", ("torch", "saccade.reproduce.runner"))
    monkeypatch.chdir(Path(__file__).parents[2])  # the workers import tests
    (tmp_path / "results").mkdir()
    process = Runner(tmp_path, {}, "cpu").context.Process()  # starts the server, so that no budget pays for it
    process.start()
    process.join()
    return lambda **options: Runner(tmp_path, {"scenes": "scenes"}, "cpu", **options)


def starts(out: Path) -> list[tuple[str, int]]:
    rows = [line.split() for line in (out / "started.txt").read_text().splitlines()]
    return [(key, int(parallel)) for key, parallel in rows]


def test_every_run_is_executed_once_and_leaves_only_its_result(make_runner, tmp_path):
    runs, lines = [planned(i) for i in range(3)], []
    runner = make_runner(jobs=2, on_event=lines.append)
    runner.execute(runs)
    assert [line.partition(" ")[0] for line in lines] == ["1/3", "2/3", "3/3"]
    assert all(read_result(tmp_path, run.key) for run in runs)
    assert list((tmp_path / "runs").iterdir()) == []
    make_runner(jobs=2).execute([*runs, planned(3)])  # only the new one
    assert sorted(key for key, _ in starts(tmp_path)) == sorted(run.key for run in [*runs, planned(3)])


def test_exclusive_runs_come_last_and_alone(make_runner, tmp_path):
    runs = [planned(0, exclusive=True), planned(1), planned(2), planned(3, exclusive=True)]
    make_runner(jobs=4).execute(runs)
    parallel = dict(starts(tmp_path))
    assert [parallel[run.key] for run in runs] == [1, 2, 2, 1]
    assert {key for key, _ in starts(tmp_path)[:2]} == {runs[1].key, runs[2].key}


def test_budget_stops_runs_with_a_checkpoint_and_a_second_session_continues_them(make_runner, tmp_path):
    runs, lines = [planned(0, long=True), planned(1)], []
    runner = make_runner(jobs=2, budget=3 / 60, on_event=lines.append)
    runner.execute(runs)
    assert read_result(tmp_path, runs[1].key)
    assert read_result(tmp_path, runs[0].key) is None
    assert lines[-1] == "stopped claim: arm 0, seed 0"
    assert runner.failed == {}
    assert (tmp_path / "runs" / runs[0].key / "checkpoint").read_text() == "half"
    make_runner().execute(runs)
    assert read_result(tmp_path, runs[0].key)["resumed"]
    assert len(starts(tmp_path)) == 3


def test_signal_stops_runs_with_a_checkpoint(make_runner, tmp_path):
    run = planned(0, long=True)
    runner = make_runner()
    ready = tmp_path / "runs" / run.key / "ready"

    def interrupt() -> None:
        while not ready.exists():
            threading.Event().wait(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=interrupt)
    thread.start()
    runner.execute([run, planned(1)])
    thread.join()
    assert runner.interrupted
    assert signal.getsignal(signal.SIGTERM) is before
    assert (ready.parent / "checkpoint").exists()
    assert [key for key, _ in starts(tmp_path)] == [run.key]


def test_failed_run_is_reported_and_does_not_stop_others(make_runner, tmp_path):
    runs = [planned(0, fail=True), planned(1)]
    runner = make_runner()
    runner.execute(runs)
    assert list(runner.failed) == [runs[0].key]
    assert runner.failed[runs[0].key].startswith("claim: arm 0, seed 0: ValueError: no such option (see ")
    assert read_result(tmp_path, runs[1].key)


def test_killed_run_is_reported_and_does_not_stop_others(make_runner, tmp_path):
    runs = [planned(0, kill=True), planned(1)]
    runner = make_runner()
    runner.execute(runs)
    assert list(runner.failed) == [runs[0].key]
    assert read_result(tmp_path, runs[1].key)


def test_error_of_the_runner_stops_its_processes(make_runner, tmp_path):
    def fail(line: str) -> None:
        raise OSError("no space left")

    runs = [planned(0, long=True), planned(1, fail=True)]
    runner = make_runner(jobs=2, on_event=fail)
    ready = tmp_path / "runs" / runs[0].key / "ready"
    runner.start(runs[0], 2)
    while not ready.exists():
        threading.Event().wait(0.05)
    process = runner.processes[runs[0].key][1]
    with pytest.raises(OSError, match="no space left"):
        runner.execute([runs[1]])
    process.join(30)
    code = process.exitcode
    process.kill()
    assert code == STOPPED


def test_server_of_the_runs_does_not_initialise_cuda():
    """CUDA cannot be used in processes forked after that."""
    code = (
        "import torch, importlib\n"
        "from saccade.reproduce.runner import Runner\n"
        "def refuse(*_): raise AssertionError('CUDA is used at import')\n"
        "torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = refuse\n"
        "for module in Runner.preload: importlib.import_module(module)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_run_by_time_is_not_started_without_time_for_it(make_runner, tmp_path):
    runs = [planned(0, exclusive=True, minutes=2.0), planned(1)]
    runner = make_runner(budget=0.5)
    runner.execute(runs)
    assert runner.waiting == {runs[0].key: "needs a budget of 3 minutes"}
    assert [key for key, _ in starts(tmp_path)] == [runs[1].key]
