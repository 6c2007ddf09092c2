"""Kill small training runs at random moments and resume them: `python -m tests.engine.kill_runs --kills 100`.

Every run is a forked process that is killed once, anywhere between its start and its end, and then resumed. Its final
weights must be those of an uninterrupted run. Prints one line of JSON; the exit code is 1 if any weights differ.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file

from saccade.engine.train import train
from tests.engine.runs import RANDOM, recipe

CHANGES = ["epochs=2", "trainer.save_every=1", *RANDOM]  # 6 steps


def fork(work: Callable[[], object]) -> int:
    """Process id of a child that runs `work`; its output is discarded."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        work()
        code = 0
    finally:
        os._exit(code)


def run(out: Path) -> None:
    train(recipe(*CHANGES), out, resume=True, progress=False)


def same_weights(first: Path, second: Path) -> bool:
    for name in ("last.safetensors", "best.safetensors"):
        a, b = load_file(first / name), load_file(second / name)
        if a.keys() != b.keys() or not all(a[key].equal(b[key]) for key in a):
            return False
    return True


def kill_runs(kills: int, seed: int, folder: Path) -> dict[str, int]:
    """Count kills, runs that had not ended when the signal came, and runs with equal final weights."""
    rng = random.Random(seed)
    start = time.perf_counter()
    assert os.waitpid(fork(lambda: run(folder / "uninterrupted")), 0)[1] == 0
    duration = time.perf_counter() - start
    killed = equal = number = 0
    while killed < kills:
        out = folder / f"run-{number}"
        number += 1
        pid = fork(lambda out=out: run(out))
        time.sleep(rng.random() * duration)
        os.kill(pid, signal.SIGKILL)
        if os.waitpid(pid, 0)[1] != signal.SIGKILL:
            shutil.rmtree(out, ignore_errors=True)
            continue  # it had ended: not a kill
        killed += 1
        status = os.waitpid(fork(lambda out=out: run(out)), 0)[1]
        equal += status == 0 and same_weights(folder / "uninterrupted", out)
        shutil.rmtree(out, ignore_errors=True)
    return {"kills": killed, "equal": equal, "runs": number}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engine.kill_runs")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = kill_runs(options.kills, options.seed, Path(folder))
    print(json.dumps(result))
    return 0 if result["equal"] == result["kills"] else 1


if __name__ == "__main__":
    sys.exit(main())
