"""`saccade explain IMAGE…`: what every token sees, as one page and PNG files; with --score, how good that is."""

import argparse
import sys
from typing import Any

HELP = "draw what the tokens of a model see in your pictures, or score them on pictures with a known truth"
EXAMPLE = "saccade explain photo.jpg --model svit_nano --out explained"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("images", metavar="IMAGE", nargs="*", help="pictures, bundled photographs by name, or videos")
    parser.add_argument("--model", required=True, metavar="NAME|CHECKPOINT", help="a model's name or a file of weights")
    parser.add_argument(
        "--score", metavar="DATA", help="Parquet, COCO JSON, a folder with images/ and annotations/, or: scenes"
    )
    parser.add_argument("--limit", type=int, default=50, help="with --score: at most so many pictures; 0 is all")
    parser.add_argument("--target", metavar="CLASS", help="class to explain, number or name (default: the answer)")
    parser.add_argument(
        "--size", type=int, help="look at about SIZE x SIZE pixels (default: what the model is made for)"
    )
    parser.add_argument("--most", type=int, default=12, help="tokens drawn one by one (default: 12)")
    parser.add_argument("--all", action="store_true", help="draw every token one by one")
    parser.add_argument(
        "--importance",
        choices=("both", "gradient", "occlusion", "none"),
        default="both",
        help="how tokens are ranked; occlusion runs the model once a token (default: both)",
    )
    parser.add_argument("--anchor", default="0.5,0.5", metavar="X,Y", help="place whose attention SViT shows, 0 to 1")
    parser.add_argument("--arrays", action="store_true", help="also save all maps and numbers as arrays.npz")


def run(args: argparse.Namespace) -> int:
    from saccade.cli import pick_device, print_json, settings
    from saccade.explain.explanation import explain
    from saccade.explain.image_explanation import KINDS
    from saccade.explain.scores.score import score

    if bool(args.images) == bool(args.score):
        print("saccade explain: name pictures to draw, or a data set to score with --score DATA", file=sys.stderr)
        return 2
    check_positive(args)
    out = args.out or "explained"
    common = dict(device=pick_device(args.device), seed=args.seed, options=settings(args.set), size=args.size)
    if args.score:
        scores = score(args.score, args.model, limit=args.limit or None, tell=progress(args), **common)
        page = scores.save(out)
        if args.json:
            print_json(scores.summary() | {"page": str(page)})
        else:
            print_scores(scores)
            print(f"wrote {page}")
        return 1 if scores.skipped else 0
    kinds = {"both": KINDS, "none": ()}.get(args.importance, (args.importance,))
    found = explain(
        [named_photo(image) for image in args.images],
        args.model,
        target=args.target,
        most=args.most,
        importance=kinds,
        anchor=parse_anchor(args.anchor),
        all_tokens=args.all,
        tell=progress(args),
        **common,
    )
    page = found.save(out, arrays=args.arrays)
    if args.json:
        print_json(found.summary() | {"page": str(page)})
    else:
        for image in found.images:
            first = f"{image.answers[0][0]}, {image.answers[0][1]:.1%}" if image.answers else "no classes"
            print(f"{image.name}: {first}; {', '.join(image.figures)}")
        if not found.trained:
            print("These weights are fresh: the pictures show how the model works, not what it knows.")
        print(f"wrote {page}")
    for name, reason in found.skipped.items():
        print(f"left out {name}: {reason}", file=sys.stderr)
    return 1 if found.skipped else 0


def named_photo(image: str) -> str:
    """A file, or one of the bundled photographs by its name ("cat")."""
    from pathlib import Path

    from saccade.data.photos import photo_paths

    bundled = photo_paths()
    return str(bundled[image]) if image in bundled and not Path(image).exists() else image


def parse_anchor(text: str) -> tuple[float, float]:
    try:
        x, y = (float(value) for value in text.split(","))
    except ValueError:
        raise ValueError(f"--anchor {text}: expected X,Y such as 0.4,0.6") from None
    return x, y


def check_positive(args: argparse.Namespace) -> None:
    for name, least in (("size", 32), ("most", 1), ("limit", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name} {value}: expected at least {least}")


def progress(args: argparse.Namespace):
    """Lines to the terminal while it works; silence for machines."""
    if args.json or not sys.stderr.isatty():
        return None
    return lambda line: print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def print_scores(scores: Any) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from saccade.explain.scores.score import rows_as_text

    console = Console()
    for name in ("superpixels", "maps", "pointing"):
        rows = getattr(scores, name)
        if not rows:
            continue
        head, *body = rows_as_text(rows)
        title = f"{scores.model}: {name}, {scores.pictures} pictures"
        table = Table(box=box.SIMPLE_HEAD, title=title, padding=(0, 1, 0, 0))
        for column in head:
            words = column in ("step", "by")
            short = {
                "segments": "parts",
                "accuracy": "acc.",
                "undersegmentation": "under",
                "compactness": "compact",
            }.get(column, column)
            table.add_column(short, justify="left" if words else "right", no_wrap=words)
        for row in body:
            table.add_row(*row)
        console.print(table)
    for name, curve in scores.curves.items():
        console.print(f"{name}: area {curve['area']:.4f}")
    for name, reason in scores.skipped.items():
        console.print(f"left out {name}: {reason}")
