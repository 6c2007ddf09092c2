"""`saccade bench`: measure several models in one interleaved run."""

import argparse
import json
import sys
from operator import itemgetter
from pathlib import Path
from typing import Any

from saccade._errors import UsageError
from saccade.cli import MAX_SIDE, integer, number

HELP = "measure speed, memory and cost of saccade's and timm's models in one interleaved run"
EXAMPLE = "saccade bench svit_small swin_tiny_patch4_window7_224 --batch 8 --mode inference train"
FLAGS = ("out", "set", "device")  # of the shared ones
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
RUNS, FORMATS = ("eager", "compiled", "cuda_graph", "compiled_graph"), ("contiguous", "channels_last")
CONDITIONS = ("size", "batch", "mode", "compiled", "dtype", "channels_last", "optimized", "cuda_graph")
COLUMNS = ("px", "n", "run", "images/s", "±%", "ratio", "G", "TFLOP/s", "top%", "MiB")
MAX_SPREAD = 0.2  # relative to the median; a larger one is flagged
SCALING_SIZES = (224, 320, 448, 640, 896, 1024)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="name of a saccade or timm model")
    parser.add_argument(
        "--sizes", type=integer(1, MAX_SIDE), nargs="+", metavar="PX", help="image sizes (default: 224)"
    )
    parser.add_argument("--batch", type=integer(), nargs="+", default=[8], metavar="N", help="batch sizes (default: 8)")
    parser.add_argument(
        "--mode",
        nargs="+",
        choices=("inference", "train", "batch"),
        default=["inference"],
        help="batch: batch prediction from JPEG files to Parquet, against a loop over the model",
    )
    parser.add_argument(
        "--run", nargs="+", choices=RUNS, default=["eager"], help="*_graph: capture a CUDA graph and replay it"
    )
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16", "float16"), default=["float32"])
    parser.add_argument(
        "--memory-format",
        nargs="+",
        choices=FORMATS,
        default=["contiguous"],
        help="memory format of images and weights",
    )
    parser.add_argument("--channels-last", action="store_true", help="short for --memory-format channels_last")
    parser.add_argument(
        "--optimize",
        nargs="?",
        const="only",
        choices=("only", "both"),
        help="measure copies from saccade.optimize; both: original and optimized",
    )
    parser.add_argument("--baseline", metavar="MODEL", help="model that ratios refer to (default: the first)")
    parser.add_argument("--rounds", type=integer(), default=7, help="measurements per case (default: 7)")
    parser.add_argument("--seconds", type=number(0), default=0.2, help="minimum seconds per measurement (default: 0.2)")
    parser.add_argument("--threads", type=integer(1, 1024), help="CPU threads")
    parser.add_argument("--name", help="name of the files in --out (default: date, machine and mode)")
    parser.add_argument(
        "--scaling", action="store_true", help=f"measure cost against image size, at {SCALING_SIZES} px"
    )


def run(args: argparse.Namespace) -> int:
    import torch

    from saccade.benchmark import DTYPES, describe_machine, measure, measure_ceiling
    from saccade.cli import pick_device, print_json, spinner

    if args.name and not args.out:
        raise UsageError("--name names the files in --out, got no --out. Add it.")
    device = pick_device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    if "batch" in args.mode:
        return run_batch(args, device)
    cases = make_cases(args, device)
    ceilings = {dtype: measure_ceiling(device, DTYPES[dtype]) for dtype in args.dtype}
    rows: list[dict[str, Any]] = []
    with spinner("starting", args) as report:
        for dtype in args.dtype:
            selected = [case for case in cases if case.dtype == dtype]
            rows += [m.to_dict() for m in measure(selected, args.rounds, args.seconds, ceilings[dtype], report)]
            # Other load before the run must not lower the ceiling: take the better of two measurements.
            ceilings[dtype] = max(ceilings[dtype], measure_ceiling(device, DTYPES[dtype]))
    for row in rows:
        row["fraction_of_ceiling"] = row["tflops"] / ceilings[row["dtype"]].tflops
    add_ratios(rows, args.baseline or args.models[0])
    document = {
        "command": " ".join(["saccade", *sys.argv[1:]]),
        "machine": describe_machine(device),
        "ceilings": {dtype: ceiling._asdict() for dtype, ceiling in ceilings.items()},
        "rows": rows,
    }
    if args.json:
        print_json(document)
    else:
        print_measurements(document)
    for file in write_results(document, args) if args.out else []:  # after the measurements are printed
        if not args.json:
            print(f"wrote {file}")
    return 0


def run_batch(args: argparse.Namespace, device: str) -> int:
    """Measure batch prediction; the conditions of the other modes do not apply."""
    from itertools import product

    from saccade import list_models
    from saccade.benchmark import DTYPES, describe_machine
    from saccade.benchmark.batch import measure_batch
    from saccade.cli import check_model, print_json, settings, spinner

    defaults = {"mode": ["batch"], "run": ["eager"], "memory_format": ["contiguous"], "channels_last": False}
    defaults |= {"optimize": None, "baseline": None, "scaling": False, "out": None, "name": None}
    for flag, default in defaults.items():
        if getattr(args, flag) != default:
            raise UsageError(f"--{flag.replace('_', '-')} does not apply to --mode batch. Remove it.")
    if unknown := sorted(set(args.models) - set(list_models())):
        raise UsageError(f"expected saccade's models for --mode batch, got {unknown[0]}. `saccade models` lists them.")
    options, rows = settings(args.set), []
    for name in args.models if options else ():
        check_model(name, options)
    with spinner("starting", args) as report:
        for name, size, batch, dtype in product(args.models, args.sizes or (224,), args.batch, args.dtype):
            autocast = None if dtype == "float32" else DTYPES[dtype]
            timing = (device, autocast, args.rounds, args.seconds, report)
            row = measure_batch(name, size, batch, *timing, **options).to_dict() | {"dtype": dtype}
            rows.append(row)
    machine = describe_machine(device)
    if args.json:
        print_json({"command": " ".join(["saccade", *sys.argv[1:]]), "machine": machine, "rows": rows})
        return 0
    for row in rows:
        print(
            f"{row['model']}, {row['size']} px, batch {row['batch']}, {row['dtype']}: {row['loop']:.1f} images/s in a "
            f"loop over the model, {row['predict']:.1f} from files to Parquet, ratio {row['ratio']:.2f}"
        )
    print(f"{machine['device']}, {machine['threads']} threads, torch {machine['torch']}, {rows[0]['images']} images")
    return 0


def make_cases(args: argparse.Namespace, device: str) -> list[Any]:
    from itertools import product

    import timm

    from saccade import list_models
    from saccade.benchmark import Case
    from saccade.cli import check_model, settings

    for name in [*args.models, *([args.baseline] if args.baseline else [])]:
        if not timm.is_model(name):
            raise UsageError(f"unknown model {name!r}. `saccade models` and timm.list_models() list the names.")
    if args.baseline and args.baseline not in args.models:
        args.models = [*args.models, args.baseline]
    options, own_models = settings(args.set), set(list_models())
    if options and not own_models & set(args.models):
        raise UsageError(f"--set is for saccade's models, got {', '.join(args.models)} only. Remove it.")
    for name in own_models & set(args.models) if options else ():
        check_model(name, options)
    sizes = args.sizes or (SCALING_SIZES if args.scaling else (224,))
    formats = ["channels_last"] if args.channels_last else args.memory_format
    copies = {None: [False], "only": [True], "both": [False, True]}[args.optimize]
    graphs = [run for run in args.run if run.endswith("_graph")]
    if graphs and not device.startswith("cuda"):
        kind = ValueError if args.device == "auto" else UsageError  # auto: only this machine says that there is no GPU
        raise kind(f"--run {graphs[0]} needs a CUDA device, got {device}. Remove it from --run.")
    if "train" in args.mode and args.optimize == "only":
        raise UsageError("--optimize copies are inference-only. Remove train from --mode, or use --optimize both.")
    axes = product(args.dtype, args.mode, args.run, formats, copies, args.batch, sizes, args.models)
    return [
        Case(
            name,
            size,
            batch,
            mode,
            run.startswith("compiled"),
            dtype,
            layout == "channels_last",
            device,
            copy,
            run.endswith("_graph"),
            (options if name in own_models else {}) | size_options(name, size),
        )
        for dtype, mode, run, layout, copy, batch, size, name in axes
        if mode == "inference" or not copy
    ]


def size_options(name: str, size: int) -> dict[str, Any]:
    """Return the `img_size` keyword for timm models with a fixed input size, else nothing."""
    import timm

    config = timm.models.get_pretrained_cfg(name)
    fixed = config is not None and config.fixed_input_size and config.input_size[-1] != size
    return {"img_size": size} if fixed else {}


def add_ratios(rows: list[dict[str, Any]], baseline: str) -> None:
    """Add images per second relative to the baseline model under the same conditions."""
    conditions = itemgetter(*CONDITIONS)
    speeds = {conditions(row): row["images_per_second"] for row in rows if row["model"] == baseline}
    for row in rows:
        row["baseline"] = baseline
        row["ratio"] = row["images_per_second"] / speeds[conditions(row)]


def write_results(document: dict[str, Any], args: argparse.Namespace) -> list[Path]:
    """Write the measurements as JSON and as one HTML page, and the plot as PNG; returns the paths."""
    from saccade._files import write_file
    from saccade.benchmark import plot_accuracy, plot_scaling, published_accuracy
    from saccade.reports import render, to_png, to_svg

    machine, rows = document["machine"], document["rows"]
    card = "-".join(machine["device"].split()[:3]).lower().replace("(r)", "").replace("/", "")
    stem = args.name or f"{machine['date']}-{card}-{'scaling' if args.scaling else '-'.join(args.mode)}"
    title = f"{machine['device']}, torch {machine['torch']}, {machine['date']}"
    chart, note = None, ""
    if args.scaling:
        chart = plot_scaling(rows, title)
    elif first := next((row for row in rows if published_accuracy(row) is not None), None):
        chart = plot_accuracy([row for row in rows if all(row[key] == first[key] for key in CONDITIONS)], title)
        note = (
            f"Accuracy is published, speed measured: {describe_run(first)}, {first['size']} px, batch {first['batch']}."
        )
    page = render(
        "benchmark.html",
        **document,
        chart=chart and to_svg(chart),
        note=note,
        noisy=noisy(rows),
        limit=f"{MAX_SPREAD:.0%}",
        heads=("model", *COLUMNS),
        cells=[table_row(row) for row in rows],
        numeric=range(1, len(COLUMNS) + 1),
        legend=describe_ceilings(document),
    )
    files: dict[str, str | bytes] = {"json": json.dumps(document, indent=1), "html": page}
    if chart:
        files["png"] = to_png(chart)
    return [write_file(Path(args.out) / f"{stem}.{suffix}", content) for suffix, content in files.items()]


def print_measurements(document: dict[str, Any]) -> None:
    from saccade.cli import print_table

    rows = map(table_row, document["rows"])
    print_table(("model", *COLUMNS), rows, ("model",), width=112, caption=describe_ceilings(document))
    if names := noisy(document["rows"]):
        print(f"spread above {MAX_SPREAD:.0%}, measure again with more --rounds: {', '.join(names)}")


def table_row(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a measurement: the model, then `COLUMNS`."""
    return (
        row["model"],
        str(row["size"]),
        str(row["batch"]),
        describe_run(row),
        f"{row['images_per_second']:.1f}",
        f"{100 * row['spread']:.0f}" + "!" * (row["spread"] > MAX_SPREAD),
        f"{row['ratio']:.2f}",
        f"{row['madds'] / 1e9:.2f}",
        f"{row['tflops']:.2f}",
        f"{100 * row['fraction_of_ceiling']:.0f}",
        "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}",
    )


def noisy(rows: list[dict[str, Any]]) -> list[str]:
    """Return the models of measurements whose spread is above `MAX_SPREAD`."""
    return list(dict.fromkeys(row["model"] for row in rows if row["spread"] > MAX_SPREAD))


def describe_ceilings(document: dict[str, Any]) -> str:
    """Return the device, threads, torch version and peak throughput, as below the table."""
    machine = document["machine"]
    ceilings = ", ".join(f"{d} {c['tflops']:.2f} TFLOP/s" for d, c in document["ceilings"].items())
    return f"{machine['device']}, {machine['threads']} threads, torch {machine['torch']}; ceiling {ceilings}"


def describe_run(row: dict[str, Any]) -> str:
    """Return how a row was measured, abbreviated: "infer eager bf16 nhwc opt"."""
    runs = ["comp"] * row["compiled"] + ["graph"] * row["cuda_graph"]
    words = [row["mode"][:5], "+".join(runs) or "eager", SHORT[row["dtype"]]]
    return " ".join(words + ["nhwc"] * row["channels_last"] + ["opt"] * row["optimized"])
