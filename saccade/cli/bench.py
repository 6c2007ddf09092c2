"""`saccade bench`: models side by side in one run."""

import argparse
import json
import sys
from operator import itemgetter
from pathlib import Path
from typing import Any

HELP = "measure speed, memory and cost of models side by side; saccade's and timm's"
EXAMPLE = "saccade bench svit_small swin_tiny_patch4_window7_224 --batch 8 --mode inference train"
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
RUNS, FORMATS = ("eager", "compiled", "cuda_graph", "compiled_graph"), ("contiguous", "channels_last")
CIRCUMSTANCES = ("size", "batch", "mode", "compiled", "dtype", "channels_last", "optimized", "cuda_graph")
SCALING_SIZES = (224, 320, 448, 640, 896, 1024)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="names of saccade's or timm's models")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="PX", help="sides of the image (default 224)")
    parser.add_argument("--batch", type=int, nargs="+", default=[8], metavar="N", help="images in a batch")
    parser.add_argument("--mode", nargs="+", choices=("inference", "train"), default=["inference"])
    parser.add_argument(
        "--run", nargs="+", choices=RUNS, default=["eager"], help="*_graph: launches recorded, replayed"
    )
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16", "float16"), default=["float32"])
    parser.add_argument(
        "--memory-format", nargs="+", choices=FORMATS, default=["contiguous"], help="of images and weights"
    )
    parser.add_argument("--channels-last", action="store_true", help="the same as --memory-format channels_last")
    parser.add_argument(
        "--optimize", nargs="?", const="only", choices=("only", "both"), help="measure inference copies, or both kinds"
    )
    parser.add_argument("--baseline", metavar="MODEL", help="the model that is 1.0 (default: the first)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of every case")
    parser.add_argument("--seconds", type=float, default=0.2, help="least length of a turn")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--name", help="of the files in --out (default: date, machine and mode)")
    parser.add_argument("--scaling", action="store_true", help=f"cost against pixels: sizes {SCALING_SIZES}")


def run(args: argparse.Namespace) -> int:
    import torch

    from saccade.benchmark import describe_machine, measure, measure_ceiling
    from saccade.benchmark.timing import DTYPES
    from saccade.cli import pick_device, print_json

    check_numbers(args)
    device = pick_device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    cases = make_cases(args, device)
    ceilings = {dtype: measure_ceiling(device, DTYPES[dtype]) for dtype in args.dtype}
    rows: list[dict[str, Any]] = []
    with progress_line(not args.json) as tell:
        for dtype in args.dtype:
            own = [case for case in cases if case.dtype == dtype]
            rows += [m.to_dict() for m in measure(own, args.rounds, args.seconds, ceilings[dtype], tell)]
            # What the machine reaches on its best day: a busy moment before the run must not lower it.
            ceilings[dtype] = max(ceilings[dtype], measure_ceiling(device, DTYPES[dtype]))
    for row in rows:
        row["share_of_ceiling"] = row["tflops"] / ceilings[row["dtype"]].tflops
    add_ratios(rows, args.baseline or args.models[0])
    document = {
        "command": " ".join(["saccade", *sys.argv[1:]]),
        "machine": describe_machine(device),
        "ceilings": {dtype: ceiling._asdict() for dtype, ceiling in ceilings.items()},
        "rows": rows,
    }
    files = write(document, args) if args.out else []
    if args.json:
        print_json(document)
        return 0
    print_table(document)
    for file in files:
        print(f"wrote {file}")
    return 0


def check_numbers(args: argparse.Namespace) -> None:
    threads = [] if args.threads is None else [args.threads]
    for option, values in dict(sizes=args.sizes or [], batch=args.batch, rounds=[args.rounds], threads=threads).items():
        if values and min(values) < 1:
            raise ValueError(f"--{option} {min(values)} cannot be measured: expected 1 or more.")
    if not 0 <= args.seconds < float("inf"):
        raise ValueError(f"--seconds {args.seconds}: expected a number of seconds, 0 for one step a turn.")


def make_cases(args: argparse.Namespace, device: str) -> list[Any]:
    from itertools import product

    import timm

    from saccade.benchmark import Case
    from saccade.cli import settings
    from saccade.models.registry import list_models

    for name in [*args.models, *([args.baseline] if args.baseline else [])]:
        if not timm.is_model(name):
            raise ValueError(f"unknown model {name!r}; `saccade models` and timm.list_models() have the names.")
    if args.baseline and args.baseline not in args.models:
        args.models = [*args.models, args.baseline]
    options, ours = settings(args.set), set(list_models())
    sizes = args.sizes or (SCALING_SIZES if args.scaling else (224,))
    formats = ["channels_last"] if args.channels_last else args.memory_format
    copies = {None: [False], "only": [True], "both": [False, True]}[args.optimize]
    graphs = [how for how in args.run if how.endswith("_graph")]
    if graphs and not device.startswith("cuda"):
        raise ValueError(f"CUDA graphs need a CUDA device, this is {device}: leave {graphs[0]} out of --run.")
    if "train" in args.mode and args.optimize == "only":
        raise ValueError("an inference copy cannot be trained: leave train out of --mode.")
    axes = product(args.dtype, args.mode, args.run, formats, copies, args.batch, sizes, args.models)
    return [
        Case(
            name,
            size,
            batch,
            mode,
            how.startswith("compiled"),
            dtype,
            layout == "channels_last",
            device,
            copy,
            how.endswith("_graph"),
            (options if name in ours else {}) | needs_size(name, size),
        )
        for dtype, mode, how, layout, copy, batch, size, name in axes
        if mode == "inference" or not copy
    ]


def needs_size(name: str, size: int) -> dict[str, Any]:
    """timm's fixed-size models must be told the size when they are built."""
    import timm

    config = timm.models.get_pretrained_cfg(name)
    fixed = config is not None and config.fixed_input_size and config.input_size[-1] != size
    return {"img_size": size} if fixed else {}


def add_ratios(rows: list[dict[str, Any]], baseline: str) -> None:
    """Images a second relative to the baseline under the same circumstances."""

    same = itemgetter(*CIRCUMSTANCES)
    speeds = {same(row): row["images_per_second"] for row in rows if row["model"] == baseline}
    for row in rows:
        row["baseline"] = baseline
        row["ratio"] = row["images_per_second"] / speeds[same(row)]


def write(document: dict[str, Any], args: argparse.Namespace) -> list[Path]:
    from saccade.benchmark.plot import plot_accuracy, plot_scaling
    from saccade.models.paper import COMPARED, REPORTED

    machine, folder = document["machine"], Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    card = "-".join(machine["device"].split()[:3]).lower().replace("(r)", "").replace("/", "")
    stem = args.name or f"{machine['date']}-{card}-{'scaling' if args.scaling else '-'.join(args.mode)}"
    target = folder / f"{stem}.json"
    temporary = target.with_name(f".{target.name}")
    temporary.write_text(json.dumps(document, indent=1))
    temporary.replace(target)
    title = f"{machine['device']}, torch {machine['torch']}, {machine['date']}"
    files = [target]
    if args.scaling:
        files.append(plot_scaling(document["rows"], title, folder / f"{stem}.png"))
    else:
        accuracy = {name: paper.top1 for name, paper in REPORTED.items() if paper.top1} | COMPARED
        first = document["rows"][0]
        same = [row for row in document["rows"] if all(row[key] == first[key] for key in CIRCUMSTANCES)]
        picture = plot_accuracy(same, accuracy, title, folder / f"{stem}.png")
        files += [picture] if picture else []
    return files


def print_table(document: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    machine = document["machine"]
    ceilings = ", ".join(f"{d} {c['tflops']:.2f} TFLOP/s" for d, c in document["ceilings"].items())
    caption = f"{machine['device']}, {machine['threads']} threads, torch {machine['torch']}; ceiling {ceilings}"
    table = Table(box=box.SIMPLE_HEAD, caption=caption, padding=(0, 1, 0, 0))
    table.add_column("model", no_wrap=True)
    for column in ("px", "n", "how", "images/s", "±%", "ratio", "G", "TFLOP/s", "top%", "MiB"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in document["rows"]:
        how = circumstances(row)
        table.add_row(
            row["model"],
            str(row["size"]),
            str(row["batch"]),
            how,
            f"{row['images_per_second']:.1f}",
            f"{100 * row['spread']:.0f}",
            f"{row['ratio']:.2f}",
            f"{row['madds'] / 1e9:.2f}",
            f"{row['tflops']:.2f}",
            f"{100 * row['share_of_ceiling']:.0f}",
            "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}",
        )
    Console(width=max(112, Console().width)).print(table)


def circumstances(row: dict[str, Any]) -> str:
    """How a row was measured, in few letters: "infer eager bf16 nhwc opt"."""
    runs = ["comp"] * row["compiled"] + ["graph"] * row["cuda_graph"]
    words = [row["mode"][:5], "+".join(runs) or "eager", SHORT[row["dtype"]]]
    return " ".join(words + ["nhwc"] * row["channels_last"] + ["opt"] * row["optimized"])


class progress_line:
    """A spinner that says what is under way, on a terminal; silence for machines."""

    def __init__(self, shown: bool):
        self.shown = shown

    def __enter__(self):
        if not self.shown:
            return lambda message: None
        from rich.console import Console

        self.status = Console(stderr=True).status("starting")
        self.status.start()
        return self.status.update

    def __exit__(self, *_: Any) -> None:
        if self.shown:
            self.status.stop()
