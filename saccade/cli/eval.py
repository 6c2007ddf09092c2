"""`saccade eval`: what a checkpoint is worth on a data set, by the measure of its task."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from saccade.cli.task_options import SEGMENTATION, Options, add_inference_arguments, check_options

HELP = "evaluate a checkpoint: accuracy and calibration, mIoU, or AP; every class; the papers' protocol"
EXAMPLE = """saccade eval runs/first --data scenes
         saccade eval svit_small.pth --data imagenet/ --split val --size 384 --crop-pct 1.0
         saccade eval runs/masks --data ade20k/ --scales 0.5 0.75 1 1.25 1.5 1.75 --flip
         saccade eval runs/boxes --data coco/ --split val --out results"""
OPTIONS: Options = SEGMENTATION | {
    "crop_pct": (("classification",), None),
    "views": (("classification",), (1, 1)),
    "flip": (("classification", "segmentation"), False),
    "max_detections": (("detection",), None),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a file of weights, a run's folder, or embedded weights by name"
    )
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
    parser.add_argument(
        "--flip", action="store_true", help="average with the mirrored picture: classification, segmentation"
    )
    parser.add_argument("--per-class", action="store_true", help="list every class, not only the ten weakest")
    add_inference_arguments(parser)
    group = parser.add_argument_group("detection")
    group.add_argument(
        "--max-detections",
        type=int,
        metavar="N",
        help="of a picture and class that count (default: as the run was validated, else COCO's 100)",
    )


def run(args: argparse.Namespace) -> int:
    from saccade._extras import require

    require("torchmetrics", "train")
    import torch

    from saccade.cli import pick_device, print_json
    from saccade.engine.results import machine, write_json
    from saccade.tasks.open import read_task_card

    device = pick_device(args.device)
    dtype = None if args.precision == "float32" else getattr(torch, args.precision)
    task = read_task_card(args.checkpoint).task
    check_options(args, task, OPTIONS)
    evaluate = {"classification": classification, "segmentation": segmentation, "detection": detection}[task]
    document = evaluate(args, device, dtype)
    document["machine"] = machine(torch.device(device))
    if args.out:
        write_json(Path(args.out) / "evaluation.json", document)
    if args.json:
        print_json(document)
    else:
        show(document, args.per_class)
    return 0


def classification(args: argparse.Namespace, device: str, dtype: Any) -> dict[str, Any]:
    from saccade.data.open import find_splits, find_video_splits
    from saccade.engine.evaluate import evaluate_checkpoint

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
        args.flip,
        **data_options(args.set, find_splits, find_video_splits),
    )
    shares = [None if share is None else round(share, 2) for share in evaluation.per_class]
    return {
        "checkpoint": str(args.checkpoint),
        "task": card.task,
        "model": card.name,
        "data": str(args.data),
        "size": args.size or card.preprocess.size,
        "crop_pct": args.crop_pct or card.preprocess.crop_pct,
        "flip": args.flip,
        **evaluation.summary(),
        "measure": "top-1 %",
        "per_class": dict(zip(source.classes, shares, strict=True)),
    }


def segmentation(args: argparse.Namespace, device: str, dtype: Any) -> dict[str, Any]:
    from saccade.data.open import find_mask_splits
    from saccade.engine.evaluate_masks import evaluate_segmenter_checkpoint
    from saccade.tasks.inference import Inference

    how = Inference(args.window or 0, args.stride, tuple(args.scales), args.flip)
    evaluation, card, source = evaluate_segmenter_checkpoint(
        args.checkpoint,
        args.data,
        args.split,
        args.size,
        how,
        args.workers,
        device,
        dtype,
        args.max_bad,
        **data_options(args.set, find_mask_splits),
    )
    shares = [None if share is None else round(100 * share, 2) for share in evaluation.scores.iou]
    return {
        "checkpoint": str(args.checkpoint),
        "task": card.task,
        "model": f"{card.name}+{card.head}",
        "data": str(args.data),
        "size": args.size or card.shorter,
        "inference": how._asdict(),
        **evaluation.summary(),
        "measure": "IoU %",
        "per_class": dict(zip(source.classes, shares, strict=True)),
    }


def detection(args: argparse.Namespace, device: str, dtype: Any) -> dict[str, Any]:
    """With --out also COCO's result files, detections.bbox.json and detections.segm.json."""
    from saccade.data.open import find_object_splits
    from saccade.engine.evaluate_objects import evaluate_detector_checkpoint

    most = detections_that_count(args.checkpoint) if args.max_detections is None else args.max_detections
    evaluation, card, source = evaluate_detector_checkpoint(
        args.checkpoint,
        args.data,
        args.split,
        args.size,
        min(args.batch, 16),
        args.workers,
        device,
        dtype,
        args.max_bad,
        most,
        **data_options(args.set, find_object_splits),
    )
    files = []
    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        files = evaluation.metric.write(args.out)
    shares = [None if share is None else round(share, 2) for share in evaluation.per_class]
    return {
        "checkpoint": str(args.checkpoint),
        "task": card.task,
        "model": f"{card.name}+{card.head}",
        "data": str(args.data),
        "max_detections": most,
        **evaluation.summary(),
        "measure": "box AP %",
        "per_class": dict(zip(source.classes, shares, strict=True)),
        "results": [str(file) for file in files],
    }


def data_options(pairs: Sequence[str], *finders: Callable[..., Any]) -> dict[str, Any]:
    """--set of an evaluation: how the data is opened. What no finder takes is an error that names the nearest."""
    from difflib import get_close_matches
    from inspect import signature

    from saccade.cli import settings

    found = settings(pairs)
    takes = {name: about for find in finders for name, about in signature(find).parameters.items()}
    known = sorted(name for name, about in takes.items() if about.default is not about.empty and name != "size")
    for key in found:
        if key not in known:
            near = get_close_matches(key, known, 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ValueError(f"--set {key}: no option of this data.{hint} There are {', '.join(known)}.")
    return found


def detections_that_count(checkpoint: str) -> int:
    """As the recipe beside the weights has it, so that a run's figures are found again."""
    from saccade.engine.recipe import Data, load_recipe
    from saccade.models.card import weights_file

    recipe = weights_file(checkpoint).with_name("recipe.yaml")
    return (load_recipe(recipe).data if recipe.is_file() else Data()).max_detections


def show(document: dict[str, Any], all_classes: bool) -> None:
    from saccade._extras import require
    from saccade.engine.recipe import NAMES

    console = require("rich.console", "train").Console()
    table = require("rich.table", "train").Table(title=f"{document['model']} on {document['data']}")
    if document["task"] == "detection":
        fill_precision(table, document)
    else:
        figures = [key for key in document if key in NAMES]
        names = [NAMES[key] if key == "loss" else f"{NAMES[key]} %" for key in figures]
        for column in ("pictures", *names, "unreadable"):
            table.add_column(column, justify="right")
        values = [document[key] for key in ("count", *figures, "bad")]
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in values))
    console.print(table)
    known = sorted((share, name) for name, share in document["per_class"].items() if share is not None)
    shown = known if all_classes else known[:10]
    weakest = require("rich.table", "train").Table(title="every class" if all_classes else "weakest classes")
    weakest.add_column("class")
    weakest.add_column(document["measure"], justify="right")
    for share, name in shown:
        weakest.add_row(name, f"{share:.1f}")
    console.print(weakest)
    for file in document.get("results", []):
        print(f"wrote {file}")


def fill_precision(table: Any, document: dict[str, Any]) -> None:
    """COCO's table: a row for boxes and one for masks; what has no objects to find stays empty."""
    from saccade.engine.evaluate_objects import FIGURES

    table.caption = f"{document['count']} pictures, {document['bad']} unreadable; % at {document['max_detections']} "
    table.caption += "detections a picture and class"
    for i, column in enumerate(("", *FIGURES.values())):
        table.add_column(column, justify="right" if i else "left")
    for kind in ("box", "mask"):
        if f"{kind}_ap" in document:
            figures = [document.get(f"{kind}_{name}") for name in FIGURES]
            table.add_row(kind, *("" if value is None else f"{value:.2f}" for value in figures))
