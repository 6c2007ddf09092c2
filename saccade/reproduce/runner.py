"""Run the planned runs in parallel processes on one device, within a time budget; what is done is not repeated.

Every run has a process of its own, forked from a server process that has imported everything and not initialised CUDA.
"""

import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from saccade._files import write_json
from saccade.reproduce.plan import PlannedRun

STOPPED = 75  # exit code of a run that a signal stopped after its checkpoint was saved (EX_TEMPFAIL)
STOP_SECONDS = 20.0  # before the end of the budget, in which runs save their checkpoints
KILL_SECONDS = 60.0  # after which a run that does not stop is killed
START_SECONDS = 60.0  # a run is not started with less time than this left
POLL_SECONDS = 0.2


class Runner:
    """Runs in parallel processes.

    Files of the folder `out`:
        results/KEY.json: the result of a finished run.
        runs/KEY/: checkpoint, log and specification of an unfinished run.
        cache/: decoded data sets, which the runs share.

    Args:
        data: paths by the name of their data set.
        jobs: number of processes at a time; runs that need the device to themselves get it.
        budget: minutes after which no run continues; None for no limit.
        on_event: called with a line of text about every run.
    """

    worker = "saccade.reproduce.worker"  # the module that executes a run
    preload = (worker, "jsonargparse", "pandas", "pyarrow.parquet")  # imported by the server, if installed

    def __init__(
        self,
        out: Path,
        data: Mapping[str, str],
        device: str,
        jobs: int = 1,
        budget: float | None = None,
        on_event: Callable[[str], None] = lambda line: None,
    ):
        self.out, self.data, self.device, self.jobs, self.on_event = out, data, device, jobs, on_event
        self.started = time.monotonic()
        self.deadline = None if budget is None else self.started + 60 * budget
        self.processes: dict[str, tuple[PlannedRun, BaseProcess]] = {}
        self.failed: dict[str, str] = {}  # key -> reason
        self.waiting: dict[str, str] = {}  # key -> why a run was not started within this budget
        self.finished, self.interrupted = 0, False
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"  # Windows
        self.context: Any = multiprocessing.get_context(method)
        self.context.set_forkserver_preload(list(self.preload))

    def execute(self, runs: Sequence[PlannedRun]) -> None:
        """Run everything that has no result yet; returns when done, out of time or interrupted."""
        # Runs that have the device to themselves come last, so that the others fill it before.
        pending = sorted((run for run in runs if read_result(self.out, run.key) is None), key=lambda run: run.exclusive)
        total = len(pending)
        with self.interruptible():
            try:
                while (pending or self.processes) and not (self.interrupted or self.out_of_time()):
                    self.collect(total)
                    while pending and self.has_place(pending[0]):
                        run = pending.pop(0)
                        if reason := self.too_late(run):
                            self.waiting[run.key] = reason
                        else:
                            parallel = len(self.processes) + 1 + sum(not other.exclusive for other in pending)
                            self.start(run, 1 if run.exclusive else min(self.jobs, parallel))
                    self.wait()
            finally:
                self.stop_all(total)

    def wait(self) -> None:
        """Wait until a process ends, at most `POLL_SECONDS`."""
        wait([process.sentinel for _, process in self.processes.values()], POLL_SECONDS if self.processes else 0)

    def budget_seconds(self) -> float:
        return float("inf") if self.deadline is None else self.deadline - self.started

    def out_of_time(self) -> bool:
        return self.seconds_left() <= min(STOP_SECONDS, self.budget_seconds() / 4)

    def seconds_left(self) -> float:
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()

    def has_place(self, run: PlannedRun) -> bool:
        alone = run.exclusive or any(other.exclusive for other, _ in self.processes.values())
        return len(self.processes) < (1 if alone else self.jobs)

    def too_late(self, run: PlannedRun) -> str:
        """Why a run is not started now: too little time, or a run by time that would be interrupted. "" if it is."""
        left = self.seconds_left()
        if run.minutes and left < 60 * run.minutes + START_SECONDS:  # a resumed one would count its start twice
            return f"needs a budget of {run.minutes + START_SECONDS / 60:g} minutes"
        return "no time left" if left < min(START_SECONDS, self.budget_seconds() / 3) else ""

    def start(self, run: PlannedRun, parallel: int) -> None:
        folder = self.out / "runs" / run.key
        spec = {
            "key": run.key,
            "run": run.describe(),
            "data": self.data[run.data],
            "device": self.device,
            "parallel": parallel,
            "cache": str(self.out / "cache"),
            "started": time.time(),
            "result": str(result_file(self.out, run.key)),
        }
        write_json(folder / "spec.json", spec)
        threads = os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // self.jobs)
        process = self.context.Process(target=run_worker, args=(self.worker, folder, int(threads)))
        process.start()
        self.processes[run.key] = (run, process)

    def collect(self, total: int) -> None:
        """Take note of processes that have ended."""
        for key, (run, process) in list(self.processes.items()):
            if process.exitcode is None:
                continue
            del self.processes[key]
            folder = self.out / "runs" / key
            result = read_result(self.out, key)
            if result is not None:
                shutil.rmtree(folder, ignore_errors=True)
                self.finished += 1
                self.on_event(f"{self.finished}/{total} {run.title}: {describe_result(result)}{self.time_left(total)}")
            elif process.exitcode in (STOPPED, -signal.SIGTERM, -signal.SIGKILL) and (
                self.interrupted or self.out_of_time()
            ):
                self.on_event(f"stopped {run.title}")
            else:
                self.failed[key] = f"{run.title}: {last_line(folder / 'log.txt')} (see {folder / 'log.txt'})"
                self.on_event(f"failed {self.failed[key]}")

    def time_left(self, total: int) -> str:
        """An estimate from the runs so far; nothing before every process has finished one."""
        if self.finished < self.jobs or self.finished == total:
            return ""
        seconds = (time.monotonic() - self.started) * (total - self.finished) / self.finished
        return f", about {seconds / 60:.0f} min left"

    def stop_all(self, total: int) -> None:
        """Let every process save its checkpoint; kill those that do not end."""
        for _, process in self.processes.values():
            process.terminate()
        end = time.monotonic() + KILL_SECONDS
        while self.processes and time.monotonic() < end:
            self.collect(total)
            self.wait()
        for _, process in self.processes.values():
            process.kill()
            process.join()
        self.collect(total)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """On SIGINT and SIGTERM stop as at the end of the budget."""

        def handle(*_: Any) -> None:
            self.interrupted = True

        previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def run_worker(module: str, folder: Path, threads: int) -> None:
    """Execute a run in this process, in a session of its own and with its output in FOLDER/log.txt."""
    import torch

    if hasattr(os, "setsid"):  # not on Windows; Ctrl-C is for the runner
        os.setsid()
    with open(folder / "log.txt", "ab") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
    torch.set_num_threads(threads)
    multiprocessing.set_start_method(None, force=True)  # of loader processes: the default, not that of this process
    sys.exit(import_module(module).main(folder))


def result_file(out: Path, key: str) -> Path:
    return out / "results" / f"{key}.json"


def read_result(out: Path, key: str) -> dict[str, Any] | None:
    """The stored result of a run, None without one."""
    file = result_file(out, key)
    return json.loads(file.read_text()) if file.is_file() else None


def describe_result(result: dict[str, Any]) -> str:
    if result["diverged"]:
        return "diverged"
    metrics = result["metrics"]
    name = "miou" if "miou" in metrics else "top1"
    return f"{name} {metrics[name]:.2f} in {result['minutes']:.1f} min"


def last_line(file: Path) -> str:
    lines = [line.strip() for line in file.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
