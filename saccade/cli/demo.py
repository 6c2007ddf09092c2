"""`saccade demo`: all four families on the bundled photographs, a minute of training, one page."""

import argparse
import time
from pathlib import Path
from typing import Any

HELP = "look at the bundled photographs with all four families, train one for a minute, write one page"
EXAMPLE = "saccade demo --out demo"
FAMILIES = {  # model: the figure that shows its idea best
    "svit_small": "super_tokens",
    "paca_tiny": "mosaic",
    "sparseformer_tiny": "looking",
    "vt_resnet18": "mosaic",
}
PHOTOS = ("cat", "coffee")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--train-minutes", type=float, default=1.0, help="length of the training part; 0 leaves it out")


def run(args: argparse.Namespace) -> int:
    from saccade.cli import pick_device, print_json

    out, device = Path(args.out or "demo"), pick_device(args.device)
    quiet = args.json
    rows, sections = [], []
    for name, figure in FAMILIES.items():
        row, section = look(name, figure, out, device, args.seed, quiet)
        rows.append(row)
        sections.append(section)
    trained = train(args.train_minutes, out, device, args.seed, quiet) if args.train_minutes else None
    page = write_page(rows, sections, trained, out)
    if args.json:
        print_json({"models": rows, "training": trained, "page": str(page)})
        return 0
    print_table(rows)
    print(f"open {page.resolve()}")
    return 0


def look(name: str, figure: str, out: Path, device: str, seed: int, quiet: bool) -> tuple[dict[str, Any], str]:
    """One family explains the photographs: a row of the table, and its part of the page."""
    from saccade.data.photos import photo_paths
    from saccade.explain.explanation import explain
    from saccade.explain.report import draw

    if not quiet:
        print(f"{name}: looking at {', '.join(PHOTOS)}", flush=True)
    start = time.perf_counter()
    photos = photo_paths()
    found = explain([photos[photo] for photo in PHOTOS], name, importance=("gradient",), device=device, seed=seed)
    seconds = time.perf_counter() - start
    page = found.save(out / name)
    step = found.images[0].steps[0]
    pixels = step["grid"][0] * step["grid"][1]
    row = {
        "model": name,
        "params": found.parameters,
        "tokens": step["tokens"],
        "pixels": pixels,
        "seconds": round(seconds, 1),
        "page": f"{name}/{page.name}",
    }
    section = f'<section class="picture"><h2>{name}</h2><p><a href="{row["page"]}">the whole report</a></p>'
    section += "".join(draw(image.figures[figure]) for image in found.images) + "</section>"
    return row, section


def train(minutes: float, out: Path, device: str, seed: int, quiet: bool) -> dict[str, Any] | None:
    """A minute of training on the embedded scenes, from nothing."""
    from saccade.engine.recipe import load_recipe
    from saccade.engine.train import train as run_training

    if not quiet:
        print(f"svit_nano: training on rendered scenes for {minutes:g} minutes", flush=True)
    changes = [
        "model={name: svit_nano}",
        "data.path=scenes",
        "batch_size=32",
        f"trainer.max_minutes={minutes}",
        f"seed={seed}",
    ]
    finished = run_training(load_recipe(None, changes), out / "training", False, device, "saccade demo", not quiet)
    if not finished.result:
        return None
    best, chance = finished.result["best"]["top1"], 100 / finished.result["classes"]
    return {"top1": best, "chance": chance, "page": "training/report.html"}


def write_page(rows: list[dict], sections: list[str], trained: dict | None, out: Path) -> Path:
    from saccade.explain.figure import write
    from saccade.explain.report import document, table

    cells = [
        [
            f'<a href="{row["page"]}">{row["model"]}</a>',
            f"{row['params'] / 1e6:.1f}",
            f"{row['tokens']}",
            f"{row['pixels']}",
            f"{row['seconds']}",
        ]
        for row in rows
    ]
    learned = ""
    if trained:
        learned = (
            f"<p>A minute of training from nothing on rendered scenes took <code>svit_nano</code> to "
            f"{trained['top1']:.0f} % top-1, chance is {trained['chance']:.0f} %: "
            f'<a href="{trained["page"]}">its report</a>.</p>'
        )
    body = (
        "<main><h1>A few tokens instead of every pixel</h1>"
        "<p>Four families of vision models look at the same photographs. Each groups the pixels of its first feature "
        "map into a few tokens, and draws here which pixels every token stands for.</p>"
        '<p class="warn">The four models have fresh weights: the pictures show how they group, not what they know.</p>'
        + table(["model", "M parameters", "tokens", "for pixels", "seconds, all figures"], cells, (1, 2, 3, 4))
        + learned
        + "".join(sections)
        + "</main>"
    )
    return write(out / "index.html", document("saccade: a few tokens instead of every pixel", body))


def print_table(rows: list[dict]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, caption="tokens that stand for the pixels of the first feature map")
    table.add_column("model")
    for column in ("M parameters", "tokens", "pixels", "seconds"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["model"], f"{row['params'] / 1e6:.1f}", *(str(row[k]) for k in ("tokens", "pixels", "seconds"))
        )
    Console().print(table)
