"""`saccade explain IMAGE…`: draw token maps as an HTML page and PNG files, or score them with --score."""

import argparse
import sys
from typing import Any

from saccade._errors import UsageError
from saccade.cli import MAX_SIDE, integer

HELP = "draw the token maps of a model on images, or score them against annotations"
EXAMPLE = "saccade explain photo.jpg --model svit_nano --out explained"
FLAGS = ("out", "set", "device", "seed")  # of the shared ones
SCORE_FLAGS = {"limit": 50}  # flags for --score alone, with defaults
IMAGE_FLAGS: dict[str, Any] = {
    "target": None, "full_image": False, "max_tokens": 12, "all": False, "importance": "both", "anchor": "0.5,0.5",
    "stage": None, "compare": [], "arrays": False,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from saccade.cli import add_renamed_flag

    parser.add_argument(
        "images", metavar="IMAGE", nargs="*", help="image or video files, or bundled photographs by name"
    )
    parser.add_argument("--model", required=True, metavar="NAME|CHECKPOINT", help="a model name or a checkpoint")
    parser.add_argument(
        "--score", metavar="DATA", help="Parquet, COCO JSON, a folder with images/ and annotations/, or: scenes"
    )
    parser.add_argument(
        "--limit", type=integer(0), default=50, help="with --score: maximum number of images; 0: all (default: 50)"
    )
    parser.add_argument(
        "--target", metavar="CLASS", help="class to explain, index or name (default: the predicted class)"
    )
    parser.add_argument(
        "--size", type=integer(32, MAX_SIDE), help="side of the input (default: the model's input size)"
    )
    parser.add_argument(
        "--full-image", action="store_true", help="keep the aspect ratio instead of the crop that predict classifies"
    )
    parser.add_argument("--max-tokens", type=integer(), default=12, help="tokens drawn individually (default: 12)")
    add_renamed_flag(parser, "--most", "--max-tokens")
    parser.add_argument("--all", action="store_true", help="draw every token individually")
    parser.add_argument(
        "--importance",
        choices=("both", "gradient", "occlusion", "none"),
        default="both",
        help="how tokens are ranked; occlusion runs the model once per token (default: both)",
    )
    parser.add_argument(
        "--anchor", default="0.5,0.5", metavar="X,Y", help="position in [0, 1] whose attention is drawn for SViT"
    )
    parser.add_argument("--stage", type=integer(), help="PaCa: stage whose clusters are classified (default: the last)")
    parser.add_argument(
        "--compare",
        nargs="+",
        default=[],
        metavar="NAME",
        help="SViT: timm ViTs or Swins whose attention is drawn beside",
    )
    parser.add_argument("--arrays", action="store_true", help="also save all maps as arrays.npz")


def run(args: argparse.Namespace) -> int:
    import timm

    from saccade import explain
    from saccade.cli import check_source, pick_device, print_json, settings
    from saccade.explanation import IMPORTANCE_KINDS, score

    if bool(args.images) == bool(args.score):
        raise UsageError("expected either images or --score DATA.")
    for flag, default in (SCORE_FLAGS if args.images else IMAGE_FLAGS).items():
        if getattr(args, flag) != default:
            kind = "--score, not for images" if args.images else "images, not for --score"
            raise UsageError(f"--{flag.replace('_', '-')} is for {kind}. Remove it.")
    for name in args.compare:
        if not timm.is_model(name):
            raise UsageError(
                f"expected timm's ViTs or Swins in --compare, got {name!r}. timm.list_models() lists them."
            )
    options = settings(args.set)
    check_source(args.model, options)
    out = args.out or "explained"
    common: dict[str, Any] = dict(device=pick_device(args.device), seed=args.seed, options=options, size=args.size)
    if args.score:
        scores = score(args.score, args.model, limit=args.limit or None, on_progress=progress(args), **common)
        page = scores.save(out)
        if args.json:
            print_json(scores.summary() | {"page": str(page)})
        else:
            print_scores(scores)
            print(f"wrote {page}")
        return 1 if scores.skipped else 0
    kinds = {"both": IMPORTANCE_KINDS, "none": ()}.get(args.importance, (args.importance,))
    explanation = explain(
        [named_photo(image) for image in args.images],
        args.model,
        target=args.target,
        max_tokens=args.max_tokens,
        importance=kinds,
        anchor=parse_anchor(args.anchor),
        stage=args.stage,
        compare=args.compare,
        all_tokens=args.all,
        on_progress=progress(args),
        full_image=args.full_image,
        **common,
    )
    page = explanation.save(out, arrays=args.arrays)
    if args.json:
        print_json(explanation.summary() | {"page": str(page)})
    else:
        for image in explanation.images:
            first = f"{image.predictions[0][0]}, {image.predictions[0][1]:.1%}" if image.predictions else "no classes"
            print(f"{image.name}: {first}; {', '.join(image.figures)}")
        if not explanation.trained:
            print("The weights are randomly initialised: the figures show how the model groups pixels.")
        print(f"wrote {page}")
    for name, reason in explanation.skipped.items():
        print(f"skipped {name}: {reason}", file=sys.stderr)
    return 1 if explanation.skipped else 0


def named_photo(image: str) -> str:
    """Return the path of a bundled photograph if `image` is its name ("cat"), else `image`."""
    from pathlib import Path

    from saccade.data import photo_paths

    bundled = photo_paths()
    return str(bundled[image]) if image in bundled and not Path(image).exists() else image


def parse_anchor(text: str) -> tuple[float, float]:
    try:
        x, y = (float(value) for value in text.split(","))
    except ValueError:
        raise UsageError(f"expected --anchor X,Y such as 0.4,0.6, got {text}.") from None
    return x, y


def progress(args: argparse.Namespace):
    """Return a function that prints progress on a terminal, or None."""
    if args.json or not sys.stderr.isatty():
        return None
    return lambda line: print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def print_scores(scores: Any) -> None:
    from saccade.cli import print_table
    from saccade.explanation import rows_as_text

    short = {"segments": "parts", "accuracy": "acc.", "undersegmentation": "under", "compactness": "compact"}
    for name in ("superpixels", "maps", "pointing"):
        rows = getattr(scores, name)
        if not rows:
            continue
        head, *body = rows_as_text(rows)
        title = f"{scores.model}: {name}, {scores.images} images"
        columns = [short.get(column, column) for column in head]
        text = ("step", "method")
        print_table(columns, body, text, wrapped=set(columns) - set(text), title=title)
    for name, curve in scores.curves.items():
        print(f"{name}: area {curve['area']:.4f}")
    for name, reason in scores.skipped.items():
        print(f"skipped {name}: {reason}")
