"""`saccade eval`: evaluate a checkpoint on a data set with the metrics of its task."""

import argparse
from pathlib import Path
from typing import Any

from saccade.cli import MAX_SIDE, integer, number
from saccade.cli.task_options import add_inference_arguments

HELP = "evaluate a checkpoint: accuracy and calibration, mIoU or AP, and per class; by the papers' protocol"
EXAMPLE = """saccade eval runs/first --data scenes
         saccade eval svit_small.pth --data imagenet/ --split val --size 384 --crop-pct 1.0
         saccade eval runs/masks --data ade20k/ --scales 0.5 0.75 1 1.25 1.5 1.75 --flip
         saccade eval runs/boxes --data coco/ --split val --out results"""
FLAGS = ("out", "set", "device")  # of the shared ones

COCO_METRICS = {"ap": "AP", "ap50": "AP50", "ap75": "AP75"}  # of boxes and of masks, with display names
COCO_METRICS |= {"ap_small": "AP small", "ap_medium": "AP medium", "ap_large": "AP large", "ar": "AR"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from saccade.cli import add_renamed_flag

    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a weights file, a run folder, or the name of embedded weights"
    )
    parser.add_argument("--data", metavar="PATH", required=True, help="as for saccade train")
    parser.add_argument(
        "--split", help="train, val, test, … (default: the evaluation split, what training held out, or else all)"
    )
    parser.add_argument(
        "--size", type=integer(1, MAX_SIDE), metavar="PX", help="side of the input (default: the checkpoint's)"
    )
    parser.add_argument(
        "--crop-pct", type=number(0.01), metavar="X", help="centre crop / shorter side (default: the file's)"
    )
    parser.add_argument("--batch", type=integer(), default=64, metavar="N", help="images per batch")
    parser.add_argument("--workers", type=integer(0), metavar="N", help="loader processes (default: cores - 1)")
    parser.add_argument("--precision", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument(
        "--max-unreadable", type=integer(0), default=100, metavar="N", help="abort at more unreadable images"
    )
    add_renamed_flag(parser, "--max-bad", "--max-unreadable")
    parser.add_argument(
        "--views", type=integer(), nargs=2, default=(1, 1), metavar=("CLIPS", "CROPS"), help="per video (papers: 4 3)"
    )
    parser.add_argument(
        "--flip", action="store_true", help="average with the mirrored image: classification, segmentation"
    )
    parser.add_argument("--limit", type=integer(), metavar="N", help="evaluate a balanced subset of at most N images")
    parser.add_argument("--per-class", action="store_true", help="list all classes, not only the ten worst")
    add_inference_arguments(parser)
    group = parser.add_argument_group("detection")
    group.add_argument(
        "--max-detections",
        type=integer(),
        metavar="N",
        help="per image and class in the metric (default: the recipe's next to the weights, or else COCO's 100)",
    )


def run(args: argparse.Namespace) -> int:
    from saccade._extras import require

    require("torchmetrics", "train")
    import torch

    from saccade import evaluate
    from saccade._files import write_json
    from saccade.cli import check_source, pick_device, print_json, progress_bar, settings
    from saccade.engine.results import machine

    check_source(args.checkpoint)
    device = pick_device(args.device)
    names = ("workers", "max_unreadable", "limit", "out", "size", "crop_pct", "flip", "window", "stride")
    options: dict[str, Any] = {name: getattr(args, name) for name in (*names, "max_detections")}
    with progress_bar("evaluating", args) as on_progress:
        document = {"checkpoint": str(args.checkpoint)} | evaluate(
            args.checkpoint,
            args.data,
            args.split,
            batch_size=args.batch,
            device=device,
            dtype=None if args.precision == "float32" else getattr(torch, args.precision),
            data_options=settings(args.set),
            on_progress=on_progress,
            views=tuple(args.views),
            scales=tuple(args.scales),
            **options,
        )
    document["machine"] = machine(torch.device(device))
    if args.out:
        write_json(Path(args.out) / "evaluation.json", document)
    if args.json:
        print_json(document)
    else:
        print_tables(document, args.per_class)
    return 0


def print_tables(document: dict[str, Any], all_classes: bool) -> None:
    from saccade.cli import print_table
    from saccade.engine.results import METRIC_NAMES

    title = f"{document['model']} on {document['data']}, {document['split']}"
    if document["task"] == "detection":
        print_coco_table(document, title)
    else:
        metrics = [key for key in document if key in METRIC_NAMES]
        names = [METRIC_NAMES[key] if key == "loss" else f"{METRIC_NAMES[key]} %" for key in metrics]
        values = [document[key] for key in ("count", *metrics, "bad")]
        cells = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in values]
        print_table(("images", *names, "unreadable"), [cells], title=title)
    values = sorted((value, name) for name, value in document["per_class"].items() if value is not None)
    rows = [(name, f"{value:.1f}") for value, name in (values if all_classes else values[:10])]
    title = "all classes" if all_classes else "worst classes"
    print_table(("class", document["measure"]), rows, ("class",), title=title)
    for file in document.get("results", []):
        print(f"wrote {file}")


def print_coco_table(document: dict[str, Any], title: str) -> None:
    """Print COCO's table, one row for boxes and one for masks; metrics without objects stay empty."""
    from saccade.cli import print_table

    caption = f"{document['count']} images, {document['bad']} unreadable; % at {document['max_detections']} "
    caption += "detections per image and class"
    rows = []
    for kind in ("box", "mask"):
        if f"{kind}_ap" in document:
            metrics = [document.get(f"{kind}_{name}") for name in COCO_METRICS]
            rows.append((kind, *("" if value is None else f"{value:.2f}" for value in metrics)))
    print_table(("", *COCO_METRICS.values()), rows, ("",), title=title, caption=caption)
