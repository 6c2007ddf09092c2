"""Kill batch prediction at random moments, continue it, and compare the ids with the source.

    python benchmarks/batch_kills.py --source cifar10/test.parquet --engine ray --kills 20 --out kills.json

Each round writes into an empty folder. SIGKILL is sent to the driver (it is started again) or, with Ray, to a random
worker process (Ray starts it again); then ids, and all other columns, are compared with those of an undisturbed run.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

OPERATORS = (b"ray::MapWorker", b"ray::ReadFiles", b"ray::MapBatches", b"ray::Write", b"ray::StreamingRepartition")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, nargs="+")
    parser.add_argument("--model", default="svit_nano.tiny_imagenet")
    parser.add_argument("--engine", choices=("local", "ray"), default="ray")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--part-rows", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file with one record per kill")
    args = parser.parse_args()
    rng, records = random.Random(args.seed), []
    with tempfile.TemporaryDirectory() as folder, cluster(args.engine):
        undisturbed = Path(folder) / "undisturbed"
        finish(args, Path(folder) / "warm")  # Ray's worker processes start
        started = time.monotonic()
        finish(args, undisturbed)
        duration, expected = time.monotonic() - started, read(undisturbed)
        print(f"undisturbed: {len(expected)} rows in {duration:.1f} s", flush=True)
        for number in range(args.kills):
            target = "worker" if args.engine == "ray" and number % 2 else "driver"
            out = Path(folder) / "killed"
            record = kill_once(args, out, target, rng.uniform(0.3, 1.0) * duration, rng)
            actual = read(out)
            record["ids_equal"] = actual["id"].equals(expected["id"])
            record["rows_equal"] = actual.equals(expected)
            records.append(record)
            if args.out:
                args.out.write_text(json.dumps({"arguments": vars(args) | {"out": None}, "kills": records}, indent=1))
            print(json.dumps(record), flush=True)
            shutil.rmtree(out)
    failed = [record for record in records if not record["ids_equal"]]
    changed = [record for record in records if not record["rows_equal"]]
    print(f"{len(records)} kills: ids differ in {len(failed)}, other columns in {len(changed)}")
    return 1 if failed else 0


class cluster:
    """A Ray on this machine that outlives the drivers, as a real cluster does."""

    def __init__(self, engine: str):
        self.engine = engine

    def __enter__(self) -> None:
        if self.engine == "ray":
            import ray

            os.environ.setdefault("RAY_worker_niceness", "0")  # the drivers' own: other load would starve the workers
            ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
            os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address

    def __exit__(self, *_: Any) -> None:
        if self.engine == "ray":
            import ray

            ray.shutdown()


def start(args: argparse.Namespace, out: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "saccade.cli", "predict", args.model, *args.source, "--out", str(out), "--json"]
    command += ["--engine", args.engine, "--size", str(args.size), "--part-rows", str(args.part_rows)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(args: argparse.Namespace, out: Path) -> None:
    process = start(args, out)
    _, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {errors[-2000:]}")


def kill_once(args: argparse.Namespace, out: Path, target: str, delay: float, rng: random.Random) -> dict[str, Any]:
    """Start, kill after `delay` seconds, continue to the end."""
    process = start(args, out)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(delay)
    rows = written(out)
    victim = None
    if process.poll() is None:
        pids = [process.pid] if target == "driver" else ray_workers()
        victim = rng.choice(pids) if pids else None
        if victim is not None:
            os.kill(victim, signal.SIGKILL)
    record = {"target": target, "after_seconds": round(delay, 1), "rows_written": rows, "hit": victim is not None}
    if target == "driver":
        process.communicate()
        finish(args, out)
    else:
        _, errors = process.communicate()
        record["driver_exit_code"] = process.returncode
        if process.returncode:  # Ray gave up; a second run must complete it
            record["driver_error"] = errors.strip().splitlines()[-1][:300] if errors.strip() else ""
            finish(args, out)
    return record


def ray_workers() -> list[int]:
    """Processes that run operators of Ray Data: descendants of this process, named after the operator."""
    pids = []
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if (entry / "cmdline").read_bytes().startswith(OPERATORS):
                    pids.append(int(entry.name))
            except OSError:
                continue

    def is_ours(pid: int) -> bool:
        while pid > 1:
            if pid == os.getpid():
                return True
            pid = parents.get(pid, 0)
        return False

    return [pid for pid in pids if is_ours(pid)]


def written(out: Path) -> int:
    """Rows in complete files; a file that is being written has no footer."""
    rows = 0
    for file in out.glob("**/[!.]*.parquet"):
        if not any(part.startswith("_") for part in file.relative_to(out).parts):
            try:
                rows += pq.read_metadata(file).num_rows
            except Exception:
                continue
    return rows


def read(out: Path) -> Any:
    return pq.read_table(out).sort_by("id")


if __name__ == "__main__":
    sys.exit(main())
