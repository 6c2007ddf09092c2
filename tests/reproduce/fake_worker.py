"""A replacement of `saccade.reproduce.worker` without training, which behaves as the kwargs of the run say."""

import json
import os
import signal
import sys
import time
from pathlib import Path


def main(folder: Path) -> int:
    spec = json.loads((folder / "spec.json").read_text())
    behaviour = spec["run"]["kwargs"]
    with open(folder.parent.parent / "started.txt", "a") as file:
        file.write(f"{spec['key']} {spec['parallel']}\n")
    if behaviour.get("fail"):
        print("ValueError: no such option", file=sys.stderr)
        return 1
    if behaviour.get("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    checkpoint = folder / "checkpoint"
    if behaviour.get("long") and not checkpoint.exists():
        signal.signal(signal.SIGTERM, lambda *_: (checkpoint.write_text("half"), sys.exit(75)))
        (folder / "ready").write_text("")
        while True:
            time.sleep(0.05)
    result = {
        "diverged": None,
        "metrics": {"top1": 50.0},
        "minutes": 0.1,
        "epochs": 1.0,
        "multiply_adds": 1,
        "shared": False,
    }
    result |= {"latency_ms": None, "machine": {"device": "none", "torch": "0", "date": "today"}}
    result |= {"resumed": checkpoint.exists()}
    Path(spec["result"]).write_text(json.dumps(result))
    return 0
