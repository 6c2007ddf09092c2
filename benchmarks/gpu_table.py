"""Measure the throughput table of docs/speed.md on one GPU.

    python benchmarks/gpu_table.py --warm                 # compile every model in parallel, to fill the caches
    python benchmarks/gpu_table.py --out DIR --minutes 6  # measure column by column, writing after each

Every column is one interleaved run over all models in a separate process, most important first; columns for which
there is no time left are listed. Writes table.json and scaling.json to --out; tools/make_speed.py generates the page.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch

import saccade  # noqa: F401  (registers the models)
from saccade.benchmark import Case, describe_machine, measure, measure_ceiling
from saccade.cli.bench import add_ratios, size_options

SACCADE = ("svit_small", "paca_small", "sparseformer_tiny", "vt_resnet50")
TIMM = ("resnet50", "swin_tiny_patch4_window7_224", "pvt_v2_b2", "deit_small_patch16_224")
MODELS = (*SACCADE, *TIMM)
SCALED = ("sparseformer_tiny", "paca_small", "svit_small", "swin_tiny_patch4_window7_224", "deit_small_patch16_224")
SCALING = (224, 448, 640, 1024)
COMPILED = (*SACCADE, "resnet50", "swin_tiny_patch4_window7_224")  # compiling takes minutes
SECONDS = 0.5  # per measurement: the first launches wait for a host that was busy with another model
COLUMNS = {  # the other compiled columns use mode="reduce-overhead" and `saccade.inference.compile.compile_options`
    "torch.compile(model)": dict(compiled=True, plain=True),
    'torch.compile(model, mode="reduce-overhead")': dict(compiled=True, cuda_graph=True, plain=True),
    "training, plain loop": dict(mode="train", plain=True),
    "training, torch.compile(model)": dict(mode="train", compiled=True, plain=True),
    "eager": dict(),
    "CUDA graph": dict(cuda_graph=True),
    "1024 px, CUDA graph": dict(size=1024, batch=8, cuda_graph=True),
    "training": dict(mode="train"),
    "training, CUDA graph": dict(mode="train", cuda_graph=True),
    "compiled": dict(compiled=True, cuda_graph=True),
    "compiled training": dict(compiled=True, cuda_graph=True, mode="train"),
    "1024 px": dict(size=1024, batch=8),
    "optimised": dict(optimized=True),
    "compiled, optimised": dict(compiled=True, cuda_graph=True, optimized=True),
}


def case(model: str, size: int = 224, batch: int = 128, **how) -> Case:
    options = size_options(model, size)
    return Case(model, size, batch, dtype="bfloat16", channels_last=True, device="cuda", options=options, **how)


def run_column(cases: list[Case], ceiling, rounds: int) -> tuple[list[dict], list[str]]:
    """Return the rows of the cases that work, and the errors of the others."""
    try:
        rows = [result.to_dict() for result in measure(cases, rounds, SECONDS, ceiling)]
        return rows, []
    except Exception as problem:
        traceback.print_exc()
        if len(cases) == 1:
            return [], [f"{cases[0].model}: {problem!r}"[:300]]
    rows, failures = [], []
    for one in cases:  # measure the others without the one that fails
        torch.cuda.empty_cache()
        own_rows, own_failures = run_column([one], ceiling, rounds)
        rows, failures = rows + own_rows, failures + own_failures
    return rows, failures


def save(path: Path, rows: list[dict], ceiling, notes: list[str]) -> None:
    for row in rows:
        row.pop("rounds", None)
    document = {
        "command": "benchmarks/run_all.sh",
        "machine": describe_machine("cuda"),
        "ceilings": {"bfloat16": ceiling._asdict()},
        "notes": notes,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1))


def table(out: Path, deadline: float, columns: list[str], rounds: int, models: list[str]) -> None:
    """Measure every column in a separate process, so that none inherits caches or memory of another."""
    ceiling = measure_ceiling("cuda", torch.bfloat16)
    print(f"ceiling {ceiling.tflops:.0f} TFLOP/s, copy {ceiling.gbytes:.0f} GB/s", flush=True)
    rows, notes = [], []
    for name in columns:
        if time.time() > deadline:
            notes.append(f"{name}: no time left")
            continue
        start, part = time.time(), out / "column.json"
        part.unlink(missing_ok=True)
        options = ["--out", str(part), "--rounds", str(rounds), "--models", *models]
        subprocess.run([sys.executable, __file__, "--column", name, *options])
        result = json.loads(part.read_text()) if part.is_file() else {"rows": [], "notes": [f"{name}: stopped"]}
        part.unlink(missing_ok=True)
        rows, notes = rows + result["rows"], notes + result["notes"]
        save(out / "table.json", rows, ceiling, notes)
        print(f"{name}: {time.time() - start:.0f} s", flush=True)
    if time.time() < deadline and columns == list(COLUMNS):  # not for selected columns
        scaling(out, ceiling)
    print(*notes, sep="\n", flush=True)


def column(name: str, out: Path, rounds: int, wanted: list[str]) -> None:
    """Measure one column, all models interleaved."""
    ceiling = measure_ceiling("cuda", torch.bfloat16)
    models = [model for model in (COMPILED if COLUMNS[name].get("compiled") else MODELS) if model in wanted]
    rows, failures = run_column([case(model, **COLUMNS[name]) for model in models], ceiling, rounds)
    if any(row["model"] == "resnet50" for row in rows):
        add_ratios(rows, "resnet50")
    save(out, [row | {"column": name} for row in rows], ceiling, [f"{name}: {failure}" for failure in failures])
    for row in rows:
        memory = (row["peak_bytes"] or 0) / 2**30
        print(
            f"{name:<21}{row['model']:<30}{row['images_per_second']:9.0f} images/s ±{100 * row['spread']:.0f}% "
            f"{memory:6.2f} GiB {100 * row['fraction_of_ceiling']:5.1f}% of the ceiling"
        )


def scaling(out: Path, ceiling=None) -> None:
    """Measure cost against image size, with CUDA graphs and batch 8."""
    ceiling = ceiling or measure_ceiling("cuda", torch.bfloat16)
    cases = [case(model, size, 8, cuda_graph=True) for model in SCALED for size in SCALING]
    rows, failures = run_column(cases, ceiling, 3)
    save(out / "scaling.json", rows, ceiling, failures)
    for model in SCALED:
        model_rows = [row for row in rows if row["model"] == model]
        print(
            f"{model:<30}" + "".join(f"{row['size']:>6} px {1e3 * row['seconds']:7.2f} ms" for row in model_rows),
            flush=True,
        )


def warm(model: str, column: str) -> None:
    """Compile one model for one column, to fill the caches on disk."""
    from saccade.benchmark.timing import prepare

    start = time.time()
    try:
        step, _ = prepare(case(model, **COLUMNS[column]))
        step()
        torch.cuda.synchronize()
        print(f"{model}, {column}: {time.time() - start:.0f} s", flush=True)
    except Exception as problem:
        print(f"{model}, {column}: {problem!r}"[:300], flush=True)


def warm_all(jobs: int, models: list[str]) -> None:
    """Compile all models in parallel, training first because it takes longest."""
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "1"}
    waiting = [(model, name) for name in ("compiled training", "compiled") for model in COMPILED if model in models]
    running: list[subprocess.Popen] = []
    while waiting or running:
        running = [process for process in running if process.poll() is None]
        while waiting and len(running) < jobs:
            command = [sys.executable, __file__, "--warm-one", *waiting.pop(0)]
            running.append(subprocess.Popen(command, env=environment))
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--column", choices=COLUMNS, help="measure one column and write it to the file --out")
    parser.add_argument("--scaling", action="store_true", help="measure only cost against image size")
    parser.add_argument("--jobs", type=int, default=12, help="models compiled in parallel")
    parser.add_argument("--warm-one", nargs=2, metavar=("MODEL", "COLUMN"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected an NVIDIA GPU. `saccade bench` measures on a CPU.")
    if args.warm_one:
        warm(*args.warm_one)
    elif args.warm:
        warm_all(args.jobs, args.models)
    elif args.column:
        column(args.column, args.out, args.rounds, args.models)
    elif args.scaling:
        scaling(args.out)
    else:
        table(args.out, time.time() + 60 * args.minutes, args.columns, args.rounds, args.models)


if __name__ == "__main__":
    main()
