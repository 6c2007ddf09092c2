"""`saccade train`: train a recipe, or a model by name, on a data set."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from saccade.cli import MAX_SIDE, integer, number

HELP = "train a model from a recipe or by name; resumable, with an HTML report"
EXAMPLE = """saccade train --model svit_nano --data scenes --out runs/first
         saccade train --model svit_nano --data photos/ --out runs/photos --epochs 30 --early-stop 10
         saccade train recipes/small/svit_nano_cifar10.yaml --data cifar10/ --out runs/cifar --set optimizer.lr=5e-4
         saccade train --resume --out runs/cifar
         saccade train --model paca_nano --head paca --data scenes --out runs/masks"""
FLAGS = ("out", "set", "device")  # of the shared ones


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a YAML file, or the name of one under recipes/")
    parser.add_argument("--model", metavar="NAME", help="a saccade or timm model; replaces the recipe's")
    parser.add_argument(
        "--head",
        metavar="NAME",
        help="head for --model. Segmentation: vt_fpn, fpn, paca, upernet, sparse; detection: mask_rcnn, "
        "cascade_mask_rcnn",
    )
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="folders of images or videos by class, Parquet, COCO JSON, tar shards, a Hugging Face data set, a CSV "
        "list, or the embedded sets scenes and motions",
    )
    parser.add_argument(
        "--epochs", type=integer(), metavar="N", help="passes over the data; more of them extend a finished run"
    )
    parser.add_argument("--batch", type=integer(), metavar="N", help="images per optimizer step")
    parser.add_argument("--lr", type=number(0), metavar="RATE", help="peak learning rate")
    parser.add_argument(
        "--size", type=integer(1, MAX_SIDE), metavar="PX", help="side of the training images (default: the model's)"
    )
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--pretrained",
        action="store_true",
        default=None,
        help="start from embedded or released weights; the default for --model without a recipe, if there are any",
    )
    start.add_argument("--from-scratch", dest="pretrained", action="store_false", help="start from random weights")
    parser.add_argument("--freeze", action="store_true", default=None, help="train the classifier or head only")
    parser.add_argument(
        "--early-stop", type=integer(), metavar="N", help="stop after N validations without a better one"
    )
    parser.add_argument(
        "--limit", type=integer(), metavar="N", help="use N training and N validation images, for a quick try"
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in --out, or start it if there is none")
    parser.add_argument("--seed", type=integer(0, 2**63 - 1), help="random seed (default: the recipe's, 0)")
    parser.add_argument("--quiet", action="store_true", help="do not show progress")


def run(args: argparse.Namespace) -> int:
    from saccade._extras import require

    require("lightning.pytorch", "train")
    from saccade import train
    from saccade.cli import pick_device, print_json

    names = ("epochs", "batch", "lr", "size", "pretrained", "freeze", "early_stop", "limit", "seed")
    finished = train(
        args.recipe,
        args.out,
        model=args.model,
        head=args.head,
        data=args.data,
        resume=args.resume,
        device=None if args.device == "auto" else pick_device(args.device),
        progress=not (args.json or args.quiet),
        changes=args.set,
        command=shlex.join(["saccade", *sys.argv[1:]]),
        **{name: getattr(args, name) for name in names if getattr(args, name) is not None},
    )
    out = finished.out
    if finished.stopped:
        hint = f"the checkpoint is saved. Continue with: saccade train --resume --out {out}"
        print(f"stopped by {finished.stopped}; {hint}", file=sys.stderr)
        return 1
    if not finished.result:  # process 0 of a distributed run prints the result
        return 0
    if args.json:
        print_json(finished.result | {"out": str(out)})
    else:
        print_result(finished.result, out)
    return 0


def print_result(result: dict[str, Any], out: Path) -> None:
    from saccade.engine.results import METRIC_NAMES

    final, best, score = result["final"], result["best"], result["score"]
    metrics = [f"{METRIC_NAMES[key]} {final[key]:.2f} %" for key in final if key in METRIC_NAMES and key != "loss"]
    print(f"{result['model']} on {result['data']}: {', '.join(metrics)} on {final['count']} images")
    speed = result["train_images_per_s"]
    throughput = f", {speed:,.0f} images/s" if speed else ""
    length = f"{result['epochs']:g} epochs in {result['minutes']:.1f} min{throughput}"
    print(f"best {METRIC_NAMES[score]} {best[score]:.2f} % · {length} · {result['unreadable']} unreadable images")
    for name in ("report.html", "best.safetensors", "last.safetensors", "metrics.csv", "result.json", "recipe.yaml"):
        print(f"wrote {out / name}")
