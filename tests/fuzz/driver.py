"""Run mutated seeds through a target: count the rejected ones, record failures, peak memory and the slowest input."""

import hashlib
import mmap
import random
import resource
import shutil
import signal
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.targets import TARGETS, folder

MAX_SECONDS = 5.0  # of CPU time, of all threads: other processes of the machine do not change it
MAX_BLOCKED = 120.0  # seconds on the clock: an input that waits uses no CPU time
MAX_MEGABYTES = 1000.0


class Report(NamedTuple):
    """Result of a run."""

    target: str
    inputs: int
    rejected: int  # raised one of the target's errors
    seconds: float
    peak_megabytes: float  # of the process
    libraries_megabytes: float  # of it, after the imports and before the first input
    slowest_seconds: float  # of CPU time
    failures: dict[str, str]  # other errors, too slow or too large -> file with the first such input


class TooSlow(BaseException):
    """Raised by the timer; not an Exception, so that no handler takes it for a damaged file."""


def run(name: str, inputs: int, seed: int = 0, out: Path | None = None) -> Report:
    """Run `inputs` mutations of the target's seeds; the same ones for the same `seed`.

    The current input is in out/current-NAME: if a C library crashes, it remains there. Without `out`, as in tests, the
    process has other content and other timers: memory counts from the start of the run, and time is not limited.
    """
    target = TARGETS[name]
    seeds = target.seeds()
    rng = random.Random(f"{name} {seed}")
    current = _open_current(out, name) if out else None
    failures: dict[str, str] = {}
    libraries = _peak()
    rejected, slowest, peak = 0, 0.0, libraries
    base = 0.0 if out else libraries  # megabytes that do not count
    if out:
        signal.signal(signal.SIGPROF, _raise_too_slow)
        signal.signal(signal.SIGALRM, _raise_too_slow)
    begin = time.perf_counter()
    for number in range(inputs):
        data = seeds[number] if number < len(seeds) else target.mutate(rng.choice(seeds), rng, seeds)
        if current is not None:
            current.seek(0)
            current.write(len(data).to_bytes(8, "little") + data[: 1 << 20])
        failure = ""
        start = time.process_time()
        if out:
            _set_timers(MAX_SECONDS, MAX_BLOCKED)
        try:
            target.run(data)
        except target.errors:
            rejected += 1
        except TooSlow:
            used = time.process_time() - start
            failure = f"more than {MAX_SECONDS:g} s" if used > MAX_SECONDS / 2 else f"blocked for {MAX_BLOCKED:g} s"
        except Exception as error:
            failure = _describe(error)
        finally:
            if out:
                _set_timers(0, 0)
        slowest = max(slowest, time.process_time() - start)
        if (now := _peak()) > peak:
            if now - base > MAX_MEGABYTES:
                failure = failure or f"peak memory {now - base:.0f} MB"
            peak = now
        if failure and failure not in failures:
            failures[failure] = _save(data, name, out)
        if out is not None and number % 50_000 == 49_999:
            print(f"{name}: {number + 1} inputs, {len(failures)} failures", flush=True)
    seconds = time.perf_counter() - begin
    shutil.rmtree(folder(), ignore_errors=True)
    folder.cache_clear()
    for cached in (target.seeds, *(other.seeds for other in TARGETS.values())):  # some seeds name files in the folder
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
    return Report(name, inputs, rejected, round(seconds, 1), round(peak), round(libraries), round(slowest, 3), failures)


def _describe(error: Exception) -> str:
    """Type and the innermost line of saccade."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/saccade/" in frame.filename]
    where = f"{frames[-1].filename.rpartition('/saccade/')[2]}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__} at {where}"


def _save(data: bytes, name: str, out: Path | None) -> str:
    if out is None:
        return repr(data[:2000])
    path = out / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return str(path)


def _open_current(out: Path, name: str) -> mmap.mmap:
    out.mkdir(parents=True, exist_ok=True)
    with open(out / f"current-{name}", "w+b") as file:
        file.truncate((1 << 20) + 8)
        return mmap.mmap(file.fileno(), 0)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # KiB on Linux


def _set_timers(cpu: float, clock: float) -> None:
    """Raise `TooSlow` after this much CPU time or time; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, cpu)
    signal.setitimer(signal.ITIMER_REAL, clock)


def _raise_too_slow(*_: object) -> None:
    raise TooSlow
