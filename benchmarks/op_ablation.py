"""What every operation of `saccade.ops` saves: each switched off, the others on, per model and way of running.

    python benchmarks/op_ablation.py                                # one GPU and 16 cores, about six minutes
    python benchmarks/op_ablation.py --models svit_small --ways eager training
    python benchmarks/op_ablation.py --print FILE                   # a stored result as Markdown

A step is profiled, not timed: the sum of its kernels' GPU time, and its launches, repeat to a percent, while the wall
time of steps that wait for the CPU does not. An operation that saves less than 3 % of both, in every model and way of
running, is a candidate for deletion. Compiled cells compile a model of reduced depth for every operation, in parallel
processes, of which one at a time is profiled. Finished cells are in the file of results, and are not measured again.
"""

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.profiler import ProfilerActivity, profile

import saccade  # noqa: F401  (registers the models)
from saccade import ops
from saccade.benchmark import Case, describe_machine
from saccade.benchmark.machine import synchronize
from saccade.benchmark.timing import prepare

SHALLOW: dict[str, dict[str, Any]] = {  # options of the models that are compiled
    "svit_small": dict(depths=(1, 2, 3, 1)),
    "paca_small": dict(depths=(2, 2, 3, 1)),
    "sparseformer_tiny": dict(repeats=2, depth=3),
    "vt_resnet50": dict(layers=(1, 1, 2)),
}
WAYS: dict[str, dict[str, Any]] = {
    "eager": dict(),
    "optimized": dict(optimized=True),
    "1024 px": dict(size=1024, batch=8),
    "training": dict(mode="train"),
    "compiled": dict(compiled=True),
    "compiled training": dict(compiled=True, mode="train"),
}
THRESHOLD = 0.03
STEPS = 3  # profiled; the smallest counts
NAMED = 60  # kernels listed per cell, those launched most often first
LOCK = Path(tempfile.gettempdir()) / "saccade_op_ablation.lock"


def case_of(model: str, way: str) -> Case:
    options = SHALLOW[model] if WAYS[way].get("compiled") else {}
    settings = dict(size=224, batch=128) | WAYS[way]
    return Case(model, dtype="bfloat16", channels_last=True, device="cuda", plain=True, options=options, **settings)


def measure_cell(model: str, way: str, off: str) -> dict[str, Any]:
    """GPU milliseconds, launches and kernels of a step; eager ways also with each operation of the model off."""
    case = case_of(model, way)
    if off:
        with ops.disabled(off):
            return {"on": profiled(prepare(case)[0])}
    names, step = operations_of(case), prepare(case)[0]
    result: dict[str, Any] = {"names": names, "on": profiled(step, kernels := {}), "kernels": kernels}
    if not case.compiled:
        result["without"] = {}
        for name in names:
            with ops.disabled(name):
                result["without"][name] = profiled(step)
    return result


def operations_of(case: Case) -> list[str]:
    """The operations of a step that run fused; of a compiled step by an eager run with its choices."""
    step, _ = prepare(replace(case, compiled=False))
    with patch("torch.compiler.is_compiling", lambda: case.compiled), ops.record_implementations() as used:
        step()
    return sorted({name for name, implementation in used if implementation != "reference"})


def profiled(step: Callable[[], Any], kernels: dict[str, tuple[int, float]] | None = None) -> dict[str, float]:
    """The GPU time and the launches of a step; `kernels` is filled with counts and milliseconds by name."""
    step()
    step()
    smallest, launches = float("inf"), 0
    with open(LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for _ in range(STEPS):
            synchronize("cuda")
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                step()
                synchronize("cuda")
            events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
            smallest = min(smallest, sum(event.self_device_time_total for event in events) / 1e3)
            launches = sum(event.count for event in events)
    if kernels is not None:
        for event in sorted(events, key=lambda event: -event.count)[:NAMED]:
            kernels[event.key[:80]] = event.count, round(event.self_device_time_total / 1e3, 3)
    return {"gpu_ms": round(smallest, 3), "launches": launches}


def run_child(model: str, way: str, off: str = "") -> dict[str, Any]:
    """`measure_cell` in a process of its own."""
    command = [sys.executable, __file__, "--child", model, way, off]
    threads = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    process = subprocess.run(command, capture_output=True, text=True, env=os.environ | threads)
    lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
    if not lines:
        print(f"{model}, {way}, {off or 'all on'}: {process.stderr.strip()[-300:]}", flush=True)
    return json.loads(lines[-1]) if lines else {}


def measure_all(
    models: list[str], ways: list[str], jobs: int, results: dict[str, Any], save: Callable[[], None]
) -> None:
    cells = results["cells"]

    def measure(model: str, way: str) -> None:
        cell = pool.submit(run_child, model, way).result()
        if not cell:
            return
        cells[f"{model}, {way}"] = cell
        if "without" not in cell:
            cell["without"] = {}
            for name, run in {name: pool.submit(run_child, model, way, name) for name in cell["names"]}.items():
                if reply := run.result():
                    cell["without"][name] = reply["on"]
                    save()
        save()
        print(f"measured {model}, {way}", flush=True)

    # The second pool has one thread per cell, which waits for the processes that the first one starts.
    with ThreadPoolExecutor(jobs) as pool, ThreadPoolExecutor(len(models) * len(ways)) as waiting:
        todo = [(model, way) for way in ways for model in models if not is_measured(cells.get(f"{model}, {way}"))]
        for done in [waiting.submit(measure, model, way) for model, way in todo]:
            done.result()


def is_measured(cell: dict[str, Any] | None) -> bool:
    return cell is not None and set(cell["names"]) == set(cell["without"])


def savings(cell: dict[str, Any], name: str) -> tuple[float, float] | None:
    """Fractions of the GPU time and of the launches of a step that an operation saves."""
    without, on = cell["without"].get(name), cell["on"]
    return without and tuple(without[key] / on[key] - 1 for key in ("gpu_ms", "launches"))


def table(results: dict[str, Any]) -> str:
    """Markdown: percentages of GPU time and launches that each operation saves."""
    cells = results["cells"]
    names = sorted({name for cell in cells.values() for name in cell["without"]})
    best = {name: max(max(savings(cell, name) or (0, 0)) for cell in cells.values()) for name in names}
    lines = [f"Measured on {results['machine']}: `python benchmarks/op_ablation.py`."]
    for model in SHALLOW:
        ways = [way for way in WAYS if f"{model}, {way}" in cells]
        if not ways:
            continue
        of_model = {way: cells[f"{model}, {way}"] for way in ways}
        steps = [f"{of_model[way]['on']['gpu_ms']:.1f} ms, {of_model[way]['on']['launches']}" for way in ways]
        lines += ["", f"| `{model}` | " + " | ".join(ways) + " |", "|---" * (len(ways) + 1) + "|"]
        lines.append("| GPU time and launches of a step | " + " | ".join(steps) + " |")
        for name in sorted({name for cell in of_model.values() for name in cell["without"]}):
            saved = [savings(of_model[way], name) for way in ways]
            row = ["" if pair is None else f"{pair[0]:+.0%}, {pair[1]:+.0%}" for pair in saved]
            lines.append(f"| `{name}` | " + " | ".join(row) + " |")
    weak = [name for name in names if best[name] < THRESHOLD]
    lines += ["", f"Below {THRESHOLD:.0%} everywhere: {', '.join(f'`{name}`' for name in weak) or 'none'}."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SHALLOW), choices=list(SHALLOW))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--jobs", type=int, default=14, help="processes at a time")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/op_ablation/h200.json"))
    parser.add_argument("--print", type=Path, dest="show", metavar="FILE", help="print a stored result as Markdown")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure_cell(*args.child)), flush=True)
        return
    if args.show:
        print(table(json.loads(args.show.read_text())))
        return
    machine = ", ".join(str(value) for value in describe_machine("cuda").values())
    results = json.loads(args.out.read_text()) if args.out.exists() else {"machine": machine, "cells": {}}
    measure_all(args.models, args.ways, args.jobs, results, lambda: write(args.out, results))
    print(table(results))


def write(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=1))
    os.replace(partial, path)


if __name__ == "__main__":
    main()
