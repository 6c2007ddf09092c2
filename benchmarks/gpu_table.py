"""Measure the throughput table of docs/speed.md on one GPU.

    python benchmarks/gpu_table.py --out DIR                            # all columns, about ten minutes
    python benchmarks/gpu_table.py --out DIR --columns eager training --models svit_small resnet50
    python benchmarks/gpu_table.py --out DIR --scaling                  # cost against image size

Every cell is a process of its own, with empty kernel caches: it builds a model, makes its first call (timed, with the
compilation) and waits. When all cells of a group of columns are ready, they are timed one at a time, interleaved: no
cell inherits memory or caches of another, and none is timed while another compiles. Writes DIR/table.json (or
scaling.json) after every group; tools/make_speed.py generates the page. Columns for which no time is left are named.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

import saccade  # noqa: F401  (registers the models)
from saccade.benchmark import Case, Measurement, count, describe_machine, measure_ceiling
from saccade.benchmark.machine import PeakMemory, synchronize, timed
from saccade.benchmark.timing import prepare
from saccade.cli.bench import add_ratios, size_options

SACCADE = ("svit_small", "paca_small", "sparseformer_tiny", "vt_resnet50")
TIMM = ("resnet50", "swin_tiny_patch4_window7_224", "pvt_v2_b2", "deit_small_patch16_224")
MODELS = (*SACCADE, *TIMM)
SCALED = ("sparseformer_tiny", "paca_small", "svit_small", "swin_tiny_patch4_window7_224", "deit_small_patch16_224")
SCALING = (224, 448, 640, 1024)
# What a user writes, in groups that fit into the memory of the GPU together. "graph" captures a CUDA graph without
# torch.compile: of `saccade.optimize(..., cuda_graph=True)`, or by torch.cuda.make_graphed_callables in training.
COLUMNS: dict[str, dict[str, Any]] = {
    "eager": dict(plain=True),
    "1024 px": dict(plain=True, size=1024, batch=8),
    "training": dict(plain=True, mode="train"),
    "torch.compile(model)": dict(plain=True, compiled=True),
    'torch.compile(model, mode="reduce-overhead")': dict(plain=True, compiled=True, cuda_graph=True),
    "training, torch.compile(model)": dict(plain=True, compiled=True, mode="train"),
    'training, mode="reduce-overhead"': dict(plain=True, compiled=True, cuda_graph=True, mode="train"),
    "CUDA graph": dict(cuda_graph=True),
    "1024 px, CUDA graph": dict(size=1024, batch=8, cuda_graph=True),
    "training, backward on the calling thread": dict(mode="train"),
    "training, CUDA graph": dict(mode="train", cuda_graph=True),
    "compile_options, reduce-overhead": dict(compiled=True, cuda_graph=True),
    "training, compile_options, reduce-overhead": dict(compiled=True, cuda_graph=True, mode="train"),
}
GROUPS = ((0, 3), (3, 7), (7, 11), (11, 13))  # of COLUMNS
TABLE = [list(COLUMNS)[start:stop] for start, stop in GROUPS]
NO_COMPILE = ("pvt_v2_b2", "deit_small_patch16_224")  # left out of compiled columns, for their minutes


class Cell(NamedTuple):
    model: str
    column: str
    options: dict[str, Any]

    def case(self, device: str) -> Case:
        settings = dict(size=224, batch=128, dtype="bfloat16", channels_last=True, device=device) | self.options
        return Case(self.model, options=size_options(self.model, settings["size"]), **settings)


class Process:
    """A cell in a process that builds its model, then prints one JSON line per command."""

    def __init__(self, cell: Cell, device: str, seconds: float):
        self.cell, self.caches = cell, tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        caches = {"TRITON_CACHE_DIR": f"{self.caches.name}/triton", "TORCHINDUCTOR_CACHE_DIR": self.caches.name}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--cell", json.dumps(cell), "--device", device, "--seconds", str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | caches | {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "1"},
        )

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)
        return {"error": f"{self.cell.model}, {self.cell.column}: stopped"}

    def request(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.read()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.caches.cleanup()


def run_cell(cell: Cell, device: str, seconds: float) -> None:
    """The process of a cell: one line when it is ready, one per command on standard input ("time", "profile")."""
    step, params = prepare(case := cell.case(device))
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    first = time.perf_counter() - start
    step()
    with PeakMemory(device) as peak:
        step()
        synchronize(device)
    bytes_used = None if case.cuda_graph or peak.bytes is None else peak.bytes + params
    cost = count(case.model, case.size, **case.options)
    print(json.dumps({"first": first, "bytes": bytes_used, "params": cost.params, "madds": cost.madds}), flush=True)
    for command in sys.stdin:
        if command.strip() == "profile":
            print(json.dumps(profiled(step, device)), flush=True)
            continue
        once = timed(step, device, 3)
        timed(step, device, max(1, round(seconds / once)))  # not counted: clocks and caches of an idle process are cold
        once = timed(step, device, 3)
        print(json.dumps({"seconds": timed(step, device, max(1, round(seconds / once)))}), flush=True)


def profiled(step: Any, device: str, rows: int = 40) -> dict[str, Any]:
    """Milliseconds until a step returns and until it is done, its launches, and its longest kernels."""
    synchronize(device)
    start = time.perf_counter()
    step()
    host = time.perf_counter() - start
    synchronize(device)
    wall = time.perf_counter() - start
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        synchronize(device)
    events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    events = [event for event in events if event.device_type != torch.autograd.DeviceType.CPU]
    events.sort(key=lambda event: -event.self_device_time_total)
    return {
        "host_ms": 1e3 * host,
        "wall_ms": 1e3 * wall,
        "gpu_ms": sum(event.self_device_time_total for event in events) / 1e3,
        "launches": sum(event.count for event in events),
        "kernels": [(event.key[:90], event.count, event.self_device_time_total / 1e3) for event in events[:rows]],
    }


def run_group(cells: Sequence[Cell], deadline: float, args: argparse.Namespace) -> dict[str, Any]:
    """Build all cells, at most `args.jobs` at a time, then time them interleaved."""
    device, jobs = args.device, args.jobs
    processes, ready, failures = [], {}, []
    try:
        for first in range(0, len(cells), jobs):
            batch = [Process(cell, device, args.seconds) for cell in cells[first : first + jobs]]
            processes += batch
            for process in batch:
                reply = process.read()
                if "error" in reply:
                    failures.append(reply["error"])
                else:
                    ready[process] = reply
        seconds: dict[Process, list[float]] = {process: [] for process in ready}
        for number in range(args.rounds):
            if number and time.time() > deadline:
                break
            for process, times in seconds.items():
                times.append(process.request("time").get("seconds", float("nan")))
        rows = [row_of(process.cell, ready[process], times, device) for process, times in seconds.items()]
        reports = {}
        if args.profiles and time.time() < deadline:
            reports = {
                f"{process.cell.model}, {process.cell.column}": process.request("profile")
                for process in ready
                if process.cell.model in SACCADE
            }
        return {"rows": rows, "notes": failures, "profiles": reports}
    finally:
        for process in processes:
            process.end()


def row_of(cell: Cell, reply: dict[str, Any], seconds: list[float], device: str) -> dict[str, Any]:
    case = cell.case(device)
    row = Measurement(case, reply["params"], reply["madds"], seconds, reply["bytes"]).to_dict()
    del row["rounds"]
    row |= {"column": cell.column, "first_call": reply["first"]}
    print(
        f"{cell.column:<46}{cell.model:<30}{row['images_per_second']:9.0f} images/s ±{100 * row['spread']:.0f}% "
        f"{(row['peak_bytes'] or 0) / 2**30:6.2f} GiB, first call {reply['first']:.1f} s",
        flush=True,
    )
    return row


def table(groups: Sequence[Sequence[Cell]], file: Path, args: argparse.Namespace) -> None:
    ceiling = measure_ceiling(args.device, torch.bfloat16)
    print(f"ceiling {ceiling.tflops:.0f} TFLOP/s, copy {ceiling.gbytes:.0f} GB/s", flush=True)
    torch.cuda.empty_cache()
    deadline = time.time() + 60 * args.minutes
    rows, notes, longest = [], [], 0.0
    for cells in groups:
        columns = list(dict.fromkeys(cell.column for cell in cells))
        start = time.time()
        if start + longest > deadline:
            notes += [f"{column}: no time left" for column in columns]
            continue
        result = run_group(cells, deadline, args)
        longest = max(longest, time.time() - start)
        for column in columns:
            of_column = [row for row in result["rows"] if row["column"] == column]
            if any(row["model"] == "resnet50" for row in of_column):
                add_ratios(of_column, "resnet50")
        for row in result["rows"]:
            row["fraction_of_ceiling"] = row["tflops"] / ceiling.tflops
        rows, notes = rows + result["rows"], notes + result["notes"]
        document = {
            "command": "python benchmarks/gpu_table.py",
            "machine": describe_machine(args.device),
            "ceilings": {"bfloat16": ceiling._asdict()},
            "notes": notes,
            "rows": rows,
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(document, indent=1))
        if result["profiles"]:
            with open(file.with_name("profiles.jsonl"), "a") as log:
                log.writelines(json.dumps({key: value}) + "\n" for key, value in result["profiles"].items())
        print(f"{', '.join(columns)}: {time.time() - start:.0f} s", flush=True)
    print(*notes, *medians(rows), sep="\n", flush=True)


def medians(rows: list[dict[str, Any]]) -> list[str]:
    """Lines with the ratios that the targets of docs/speed.md are stated in."""
    speed = {(row["model"], row["column"]): row["images_per_second"] for row in rows}
    pairs = [
        ("torch.compile(model)", 'torch.compile(model, mode="reduce-overhead")'),
        ("training, torch.compile(model)", 'training, mode="reduce-overhead"'),
        ("torch.compile(model)", "eager"),
        ("training, torch.compile(model)", "training"),
    ]
    return [
        f"{left} / {right}: "
        + ", ".join(
            f"{model} {speed[model, left] / speed[model, right]:.2f}"
            for model in MODELS
            if (model, left) in speed and (model, right) in speed
        )
        for left, right in pairs
    ] + [f"median first call {statistics.median(row['first_call'] for row in rows):.1f} s" for _ in rows[:1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--minutes", type=float, default=10.0, help="after which no group of columns is begun")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.7, help="per measurement, and before it")
    parser.add_argument("--jobs", type=int, default=16, help="cells that compile at a time")
    parser.add_argument("--profiles", action="store_true", help="also write the kernels of saccade's models")
    parser.add_argument("--scaling", action="store_true", help="cost against image size, with CUDA graphs and batch 8")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("expected an NVIDIA GPU. `saccade bench` measures on a CPU.")
    if args.cell:
        run_cell(Cell(*json.loads(args.cell)), args.device, args.seconds)
    elif args.scaling:
        options = [dict(size=size, batch=8, cuda_graph=True) for size in SCALING]
        models = [model for model in SCALED if model in args.models]
        cells = [Cell(model, f"{how['size']} px", how) for model in models for how in options]
        table([cells], args.out / "scaling.json", args)
    else:
        groups = [
            [
                Cell(model, column, COLUMNS[column])
                for column in group
                if column in args.columns
                for model in args.models
                if not (COLUMNS[column].get("compiled") and model in NO_COMPILE)
            ]
            for group in TABLE
        ]
        table([cells for cells in groups if cells], args.out / "table.json", args)


if __name__ == "__main__":
    main()
