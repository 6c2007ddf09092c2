"""`saccade bench`: models side by side in one run."""

import argparse
import json
from pathlib import Path
from typing import Any

HELP = "measure speed, memory and cost of models side by side; saccade's and timm's"
EXAMPLE = "saccade bench svit_small swin_tiny_patch4_window7_224 --batch 8 --mode inference train"
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
SCALING_SIZES = (224, 320, 448, 640, 896, 1024)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="names of saccade's or timm's models")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="PX", help="sides of the image (default 224)")
    parser.add_argument("--batch", type=int, nargs="+", default=[8], metavar="N", help="images in a batch")
    parser.add_argument("--mode", nargs="+", choices=("inference", "train"), default=["inference"])
    parser.add_argument("--run", nargs="+", choices=("eager", "compiled"), default=["eager"])
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16", "float16"), default=["float32"])
    parser.add_argument("--channels-last", action="store_true", help="images and weights channels-last in memory")
    parser.add_argument("--baseline", metavar="MODEL", help="the model that is 1.0 (default: the first)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of every case")
    parser.add_argument("--seconds", type=float, default=0.2, help="least length of a turn")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--scaling", action="store_true", help=f"cost against pixels: sizes {SCALING_SIZES}")


def run(args: argparse.Namespace) -> int:
    import torch

    from saccade.benchmark import describe_machine, measure, measure_ceiling
    from saccade.benchmark.timing import DTYPES
    from saccade.cli import pick_device, print_json

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
    add_ratios(rows, args.baseline or args.models[0])
    document = {
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


def make_cases(args: argparse.Namespace, device: str) -> list[Any]:
    from itertools import product

    import timm

    from saccade.benchmark import Case
    from saccade.cli import settings
    from saccade.models._build import list_models

    for name in [*args.models, *([args.baseline] if args.baseline else [])]:
        if not timm.is_model(name):
            raise ValueError(f"unknown model {name!r}; `saccade models` and timm.list_models() have the names.")
    if args.baseline and args.baseline not in args.models:
        args.models = [*args.models, args.baseline]
    options, ours = settings(args.set), set(list_models())
    sizes = args.sizes or (SCALING_SIZES if args.scaling else (224,))
    return [
        Case(
            name,
            size,
            batch,
            mode,
            how == "compiled",
            dtype,
            args.channels_last,
            device,
            (options if name in ours else {}) | needs_size(name, size),
        )
        for dtype, mode, how, batch, size, name in product(
            args.dtype, args.mode, args.run, args.batch, sizes, args.models
        )
    ]


def needs_size(name: str, size: int) -> dict[str, Any]:
    """timm's fixed-size models must be told the size when they are built."""
    import timm

    config = timm.models.get_pretrained_cfg(name)
    fixed = config is not None and config.fixed_input_size and config.input_size[-1] != size
    return {"img_size": size} if fixed else {}


def add_ratios(rows: list[dict[str, Any]], baseline: str) -> None:
    """Images a second relative to the baseline under the same circumstances."""

    def circumstances(row: dict[str, Any]) -> tuple:
        return tuple(row[key] for key in ("size", "batch", "mode", "compiled", "dtype"))

    speeds = {circumstances(row): row["images_per_second"] for row in rows if row["model"] == baseline}
    for row in rows:
        row["baseline"] = baseline
        row["ratio"] = row["images_per_second"] / speeds[circumstances(row)]


def write(document: dict[str, Any], args: argparse.Namespace) -> list[Path]:
    from saccade.benchmark.plot import plot_accuracy, plot_scaling
    from saccade.models._paper import COMPARED, REPORTED

    machine, folder = document["machine"], Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    card = "-".join(machine["device"].split()[:3]).lower().replace("(r)", "").replace("/", "")
    stem = f"{machine['date']}-{card}-{'scaling' if args.scaling else '-'.join(args.mode)}"
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
        alike = [row for row in document["rows"] if all(row[k] == first[k] for k in ("mode", "compiled", "dtype"))]
        same = [row for row in alike if row["size"] == first["size"] and row["batch"] == first["batch"]]
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
        how = f"{row['mode'][:5]} {'comp' if row['compiled'] else 'eager'} {SHORT[row['dtype']]}"
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
