"""What every operation of `saccade.ops` saves: each switched off, the others on, per model and way of running.

    python benchmarks/op_ablation.py --out benchmarks/results/op_ablation.json      # one GPU, about half an hour
    python benchmarks/op_ablation.py --models svit_small --ways eager training      # minutes
    python benchmarks/op_ablation.py --print benchmarks/results/op_ablation.json    # the table as Markdown

A row is the time of a step with the operation off, minus that with all operations on, measured interleaved in one
process. Results are written after every model and way of running, and a second run continues where the first stopped.
An operation that saves less than 3 % everywhere is a candidate for deletion.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import saccade  # noqa: F401  (registers the models)
from saccade import ops
from saccade.benchmark import Case, describe_machine
from saccade.benchmark.timing import interleave, prepare

MODELS = ("svit_small", "paca_small", "sparseformer_tiny", "vt_resnet50")
WAYS = {
    "eager": dict(plain=True),
    "training": dict(mode="train", plain=True),
    "compiled": dict(compiled=True, plain=True),
    "compiled training": dict(compiled=True, mode="train", plain=True),
    "1024 px": dict(size=1024, batch=8, plain=True),
}
THRESHOLD = 0.03


def ablate(case: Case, rounds: int, seconds: float) -> dict[str, Any]:
    """Seconds per step with all operations on, and with each that the model uses off."""
    step, _ = prepare(case)
    with ops.record_implementations() as used:
        step()
    names = sorted({name for name, implementation in used if implementation != "reference"})
    steps = [step] + [switched_off(name, case, step) for name in names]
    for warm_up in steps:
        warm_up()
        warm_up()
    columns = list(zip(*interleave(steps, [case.device] * len(steps), rounds, seconds), strict=True))
    baseline = statistics.median(columns[0])
    without = {name: statistics.median(column) for name, column in zip(names, columns[1:], strict=True)}
    return {"seconds": baseline, "without": without}


def switched_off(name: str, case: Case, eager_step: Callable[[], Any]) -> Callable[[], Any]:
    """A step with the operation off: the same step, or a model of its own compiled with the operation off."""
    step = eager_step
    if case.compiled:
        with ops.disabled(name):
            step, _ = prepare(case)

    def run() -> None:
        with ops.disabled(name):
            step()

    return run


def table(results: dict[str, Any]) -> str:
    """Markdown: milliseconds saved, and the percentage of the step, per operation, model and way of running."""
    lines = [f"Measured on {results['machine']}.", ""]
    cells = results["cells"]
    ways = [way for way in WAYS if any(key.endswith("/" + way) for key in cells)]
    for model in dict.fromkeys(key.partition("/")[0] for key in cells):
        lines += [f"### {model}", "", "| operation | " + " | ".join(ways) + " |", "|---" * (len(ways) + 1) + "|"]
        measured = {way: cells[f"{model}/{way}"] for way in ways if f"{model}/{way}" in cells}
        for name in sorted({name for cell in measured.values() for name in cell["without"]}):
            row = []
            for way in ways:
                cell = measured.get(way)
                if cell is None or name not in cell["without"]:
                    row.append("")
                    continue
                saved = cell["without"][name] - cell["seconds"]
                row.append(f"{1e3 * saved:.2f} ms ({saved / cell['seconds']:.0%})")
            lines.append(f"| `{name}` | " + " | ".join(row) + " |")
        lines.append("")
    weak = sorted(
        name
        for name in {name for cell in cells.values() for name in cell["without"]}
        if all(
            cell["without"].get(name, 0.0) < (1 + THRESHOLD) * cell["seconds"]
            for cell in cells.values()
            if name in cell["without"]
        )
    )
    lines.append(f"Below {THRESHOLD:.0%} everywhere: {', '.join(f'`{name}`' for name in weak) or 'none'}.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--batch", type=int, default=128, help="images per step at 224 px")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="of every turn of a round")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/op_ablation.json"))
    parser.add_argument("--print", type=Path, dest="show", metavar="FILE", help="print a stored result as Markdown")
    args = parser.parse_args()
    if args.show:
        print(table(json.loads(args.show.read_text())))
        return
    results = json.loads(args.out.read_text()) if args.out.exists() else {"machine": describe(args.device), "cells": {}}
    for model in args.models:
        for way in args.ways:
            key = f"{model}/{way}"
            if key in results["cells"]:
                continue
            print(f"measuring {key}", flush=True)
            options = {"size": 224, "batch": args.batch} | WAYS[way]
            case = Case(model, dtype="bfloat16", channels_last=True, device=args.device, **options)
            results["cells"][key] = ablate(case, args.rounds, args.seconds)
            torch._dynamo.reset()
            write(args.out, results)
    print(table(results))


def describe(device: str) -> str:
    return ", ".join(str(value) for value in describe_machine(device).values())


def write(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=1))
    os.replace(partial, path)


if __name__ == "__main__":
    main()
