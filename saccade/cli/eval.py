"""`saccade eval`: evaluate a checkpoint on a data set with the metrics of its task."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from saccade.cli.task_options import SEGMENTATION, Options, add_inference_arguments, check_options

HELP = "evaluate a checkpoint: accuracy and calibration, mIoU or AP, and per class; by the papers' protocol"
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
    from saccade.cli import add_renamed_flag

    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a weights file, a run folder, or the name of embedded weights"
    )
    parser.add_argument("--data", metavar="PATH", required=True, help="as for saccade train")
    parser.add_argument("--split", help="train, val, test, … (default: the held-out split, or else all)")
    parser.add_argument("--size", type=int, metavar="PX", help="side of the input (default: the checkpoint's)")
    parser.add_argument("--crop-pct", type=float, metavar="X", help="centre crop / shorter side (default: the file's)")
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="images per batch")
    parser.add_argument("--workers", type=int, metavar="N", help="loader processes (default: cores - 1)")
    parser.add_argument("--precision", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--max-unreadable", type=int, default=100, metavar="N", help="abort at more unreadable images")
    add_renamed_flag(parser, "--max-bad", "--max-unreadable")
    parser.add_argument(
        "--views", type=int, nargs=2, default=(1, 1), metavar=("CLIPS", "CROPS"), help="per video (papers: 4 3)"
    )
    parser.add_argument(
        "--flip", action="store_true", help="average with the mirrored image: classification, segmentation"
    )
    parser.add_argument("--per-class", action="store_true", help="list all classes, not only the ten worst")
    add_inference_arguments(parser)
    group = parser.add_argument_group("detection")
    group.add_argument(
        "--max-detections",
        type=int,
        metavar="N",
        help="per image and class in the metric (default: the recipe's next to the weights, or else COCO's 100)",
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
        print_tables(document, args.per_class)
    return 0


def classification(args: argparse.Namespace, device: str, dtype: Any) -> dict[str, Any]:
    from saccade.data.open import find_splits, find_video_splits
    from saccade.engine.tasks.evaluate_classifier import evaluate_classifier_checkpoint

    evaluation, card, source = evaluate_classifier_checkpoint(
        args.checkpoint,
        args.data,
        args.split,
        args.size,
        args.crop_pct,
        args.batch,
        args.workers,
        device,
        dtype,
        args.max_unreadable,
        tuple(args.views),
        args.flip,
        **data_options(args.set, find_splits, find_video_splits),
    )
    per_class = [None if value is None else round(value, 2) for value in evaluation.per_class]
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
        "per_class": dict(zip(source.classes, per_class, strict=True)),
    }


def segmentation(args: argparse.Namespace, device: str, dtype: Any) -> dict[str, Any]:
    from saccade.data.open import find_mask_splits
    from saccade.engine.tasks.evaluate_segmenter import evaluate_segmenter_checkpoint
    from saccade.tasks.segmentation_inference import InferenceOptions

    inference = InferenceOptions(args.window or 0, args.stride, tuple(args.scales), args.flip)
    evaluation, card, source = evaluate_segmenter_checkpoint(
        args.checkpoint,
        args.data,
        args.split,
        args.size,
        inference,
        args.workers,
        device,
        dtype,
        args.max_unreadable,
        **data_options(args.set, find_mask_splits),
    )
    per_class = [None if value is None else round(100 * value, 2) for value in evaluation.scores.iou]
    return {
        "checkpoint": str(args.checkpoint),
        "task": card.task,
        "model": f"{card.name}+{card.head}",
        "data": str(args.data),
        "size": args.size or card.shorter,
        "inference": inference._asdict(),
        **evaluation.summary(),
        "measure": "IoU %",
        "per_class": dict(zip(source.classes, per_class, strict=True)),
    }


def detection(args: argparse.Namespace, device: str, dtype: Any) -> dict[str, Any]:
    """Evaluate a detector; --out also writes COCO's detections.bbox.json and detections.segm.json."""
    from saccade.data.open import find_object_splits
    from saccade.engine.tasks.evaluate_detector import evaluate_detector_checkpoint

    max_detections = args.max_detections
    if max_detections is None:
        max_detections = recipe_max_detections(args.checkpoint)
    evaluation, card, source = evaluate_detector_checkpoint(
        args.checkpoint,
        args.data,
        args.split,
        args.size,
        min(args.batch, 16),
        args.workers,
        device,
        dtype,
        args.max_unreadable,
        max_detections,
        **data_options(args.set, find_object_splits),
    )
    files = []
    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        files = evaluation.coco.write(args.out)
    per_class = [None if value is None else round(value, 2) for value in evaluation.per_class]
    return {
        "checkpoint": str(args.checkpoint),
        "task": card.task,
        "model": f"{card.name}+{card.head}",
        "data": str(args.data),
        "max_detections": max_detections,
        **evaluation.summary(),
        "measure": "box AP %",
        "per_class": dict(zip(source.classes, per_class, strict=True)),
        "results": [str(file) for file in files],
    }


def data_options(pairs: Sequence[str], *finders: Callable[..., Any]) -> dict[str, Any]:
    """Return the --set options for opening the data; an unknown one is an error that names the closest."""
    from difflib import get_close_matches
    from inspect import signature

    from saccade.cli import settings

    options = settings(pairs)
    parameters = {name: parameter for find in finders for name, parameter in signature(find).parameters.items()}
    allowed = sorted(name for name, p in parameters.items() if p.default is not p.empty and name != "size")
    for key in options:
        if key not in allowed:
            close = get_close_matches(key, allowed, 1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise ValueError(f"--set {key}: unknown data option.{hint} Known options: {', '.join(allowed)}.")
    return options


def recipe_max_detections(checkpoint: str) -> int:
    """Return the value of the recipe next to the weights, so that eval reproduces the run's metrics."""
    from saccade.engine.recipe import Data, load_recipe
    from saccade.models.card import weights_file

    recipe = weights_file(checkpoint).with_name("recipe.yaml")
    return (load_recipe(recipe).data if recipe.is_file() else Data()).max_detections


def print_tables(document: dict[str, Any], all_classes: bool) -> None:
    from saccade._extras import require
    from saccade.engine.results import METRIC_NAMES

    console = require("rich.console", "train").Console()
    table = require("rich.table", "train").Table(title=f"{document['model']} on {document['data']}")
    if document["task"] == "detection":
        fill_coco_table(table, document)
    else:
        metrics = [key for key in document if key in METRIC_NAMES]
        names = [METRIC_NAMES[key] if key == "loss" else f"{METRIC_NAMES[key]} %" for key in metrics]
        for column in ("images", *names, "unreadable"):
            table.add_column(column, justify="right")
        values = [document[key] for key in ("count", *metrics, "bad")]
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in values))
    console.print(table)
    values = sorted((value, name) for name, value in document["per_class"].items() if value is not None)
    classes = require("rich.table", "train").Table(title="all classes" if all_classes else "worst classes")
    classes.add_column("class")
    classes.add_column(document["measure"], justify="right")
    for value, name in values if all_classes else values[:10]:
        classes.add_row(name, f"{value:.1f}")
    console.print(classes)
    for file in document.get("results", []):
        print(f"wrote {file}")


def fill_coco_table(table: Any, document: dict[str, Any]) -> None:
    """Fill COCO's table, one row for boxes and one for masks; metrics without objects stay empty."""
    from saccade.engine.tasks.evaluate_detector import COCO_METRICS

    table.caption = f"{document['count']} images, {document['bad']} unreadable; % at {document['max_detections']} "
    table.caption += "detections per image and class"
    for i, column in enumerate(("", *COCO_METRICS.values())):
        table.add_column(column, justify="right" if i else "left")
    for kind in ("box", "mask"):
        if f"{kind}_ap" in document:
            metrics = [document.get(f"{kind}_{name}") for name in COCO_METRICS]
            table.add_row(kind, *("" if value is None else f"{value:.2f}" for value in metrics))
