"""`saccade eval`: what a checkpoint is worth on a data set."""

import argparse
from pathlib import Path
from typing import Any

HELP = "evaluate a checkpoint: top-1, top-5, every class, calibration; the papers' protocol"
EXAMPLE = """saccade eval runs/first --data scenes
         saccade eval svit_small.pth --data imagenet/ --split val --size 384 --crop-pct 1.0"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a .safetensors or .pth file, or a run's folder")
    parser.add_argument("--data", metavar="PATH", required=True, help="as for saccade train")
    parser.add_argument("--split", help="train, val, test, … (default: the held-out one, else all)")
    parser.add_argument("--size", type=int, metavar="PX", help="side of the input (default: the checkpoint's)")
    parser.add_argument("--crop-pct", type=float, metavar="X", help="centre crop / shorter side (default: the file's)")
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="pictures in a batch")
    parser.add_argument("--workers", type=int, metavar="N", help="loader processes (default: one per core but one)")
    parser.add_argument("--precision", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--max-bad", type=int, default=100, metavar="N", help="unreadable pictures to skip at most")
    parser.add_argument(
        "--views", type=int, nargs=2, default=(1, 1), metavar=("CLIPS", "CROPS"), help="of a video (papers: 4 3)"
    )
    parser.add_argument("--per-class", action="store_true", help="list every class, not only the ten weakest")


def run(args: argparse.Namespace) -> int:
    from saccade._extras import require

    require("torchmetrics", "train")
    import torch

    from saccade.cli import pick_device, print_json, settings
    from saccade.engine.evaluate import evaluate_checkpoint
    from saccade.engine.results import machine, write_json

    device = pick_device(args.device)
    dtype = None if args.precision == "float32" else getattr(torch, args.precision)
    evaluation, card, source = evaluate_checkpoint(
        args.checkpoint,
        args.data,
        args.split,
        args.size,
        args.crop_pct,
        args.batch,
        args.workers,
        device,
        dtype,
        args.max_bad,
        tuple(args.views),
        **settings(args.set),
    )
    shares = [None if share is None else round(share, 2) for share in evaluation.per_class]
    document = {
        "checkpoint": str(args.checkpoint),
        "model": card.name,
        "data": str(args.data),
        "size": args.size or card.preprocess.size,
        "crop_pct": args.crop_pct or card.preprocess.crop_pct,
        **evaluation.summary(),
        "per_class": dict(zip(source.classes, shares, strict=True)),
        "machine": machine(torch.device(device)),
    }
    if args.out:
        write_json(Path(args.out) / "evaluation.json", document)
    if args.json:
        print_json(document)
    else:
        show(document, args.per_class)
    return 0


def show(document: dict[str, Any], all_classes: bool) -> None:
    from saccade._extras import require

    console = require("rich.console", "train").Console()
    table = require("rich.table", "train").Table(title=f"{document['model']} on {document['data']}")
    for column in ("pictures", "top-1 %", "top-5 %", "calibration error %", "loss", "unreadable"):
        table.add_column(column, justify="right")
    values = [document[key] for key in ("count", "top1", "top5", "calibration", "loss", "bad")]
    table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in values))
    console.print(table)
    known = sorted((share, name) for name, share in document["per_class"].items() if share is not None)
    shown = known if all_classes else known[:10]
    weakest = require("rich.table", "train").Table(title="every class" if all_classes else "weakest classes")
    weakest.add_column("class")
    weakest.add_column("top-1 %", justify="right")
    for share, name in shown:
        weakest.add_row(name, f"{share:.1f}")
    console.print(weakest)
