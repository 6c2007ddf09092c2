"""`saccade demo`: all four families on the bundled photographs, a minute of training, one page."""

import argparse
import time
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

HELP = "look at the bundled photographs with all four families, train one for a minute, write one page"
EXAMPLE = "saccade demo --out demo"
SHOWN = ("cat", "coffee")  # explained in full, and named in the table
SIDE = 400  # pixels across a picture of the overview


class Family(NamedTuple):
    """One family: the model with embedded weights, and the one that shows how it groups where there are none."""

    small: str
    large: str
    figure: str  # that shows its idea best

    @property
    def model(self) -> str:
        from saccade import weights

        return self.small if weights.find(self.small) else self.large


FAMILIES = (
    Family("svit_nano", "svit_small", "super_tokens"),
    Family("paca_nano", "paca_tiny", "mosaic"),
    Family("sparseformer_nano", "sparseformer_tiny", "sampling"),
    Family("vt_nano", "vt_resnet18", "mosaic"),
)
LEARNER = "svit_nano"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--train-minutes", type=float, default=1.0, help="length of the training part; 0 leaves it out")


def run(args: argparse.Namespace) -> int:
    from saccade.cli import pick_device, print_json

    out, device = Path(args.out or "demo"), pick_device(args.device)
    tell = (lambda line: None) if args.json else (lambda line: print(line, flush=True))
    seen, steps = [], len(FAMILIES) + bool(args.train_minutes)
    for number, family in enumerate(FAMILIES, 1):
        tell(f"[{number}/{steps}] {family.model} looks at the photographs")
        seen.append(look(family, out, device, args.seed))
    trained = None
    if args.train_minutes:
        tell(f"[{steps}/{steps}] {LEARNER} learns rendered scenes for {args.train_minutes:g} min")
        trained = train(args.train_minutes, out, device, args.seed, not args.json)
    page = write_page(seen, trained, out)
    rows = [one["row"] for one in seen]
    if args.json:
        print_json({"models": rows, "training": trained, "page": str(page)})
        return 0
    print_table(rows)
    print(f"open {page.resolve()}")
    return 0


def look(family: Family, out: Path, device: str, seed: int) -> dict[str, Any]:
    """One family on all photographs: a row of the table, a column of the overview, its part of the page."""
    from PIL import Image

    from saccade.data.photos import photo_paths
    from saccade.explain.drawing.figure import Panel
    from saccade.explain.drawing.overlay import downscale
    from saccade.explain.explanation import explain
    from saccade.explain.overview import Column
    from saccade.explain.report import figure_html
    from saccade.explain.subject import load_subject
    from saccade.web.look import look_at, mosaic_picture

    start, photos = time.perf_counter(), photo_paths()
    subject = load_subject(family.model, device=device, seed=seed)
    originals, panels, said, times = [], [], {}, []
    for name, path in photos.items():
        with Image.open(path) as picture:
            found = look_at(subject, picture, name)
        answers = [{"class": label, "probability": round(chance, 4)} for label, chance in found.answers]
        said[name] = answers if subject.trained else []
        times.append(found.seconds)
        text = [f"{label} {chance:.0%}" for label, chance in found.answers[:3]] if subject.trained else []
        originals.append(Panel(downscale(found.picture, SIDE), name))
        panels.append(Panel(downscale(mosaic_picture(found, 99), SIDE), *(text[:1] or [""]), "\n".join(text[1:])))
    stages = found.stages
    pixels = prod(stages[0].step.trace.size)
    explained = explain(
        [photos[photo] for photo in SHOWN], family.model, importance=("gradient",), device=device, seed=seed
    )
    page = explained.save(out / family.model)
    figures = "".join(figure_html(lighter(image.figures[family.figure])) for image in explained.images)
    row = {
        "model": family.model,
        "trained": subject.trained,
        "params": explained.parameters,
        "predictions": said,
        "milliseconds": round(1000 * sorted(times)[len(times) // 2], 1),  # the median photograph, one forward pass
        "tokens": stages[0].step.count,
        "pixels": pixels,
        "seconds": round(time.perf_counter() - start, 1),
        "page": f"{family.model}/{page.name}",
    }
    note = f"{stages[0].step.count} tokens for {pixels:,} pixels"
    section = (
        f'<section class="image"><h2>{family.model}</h2><p><a href="{row["page"]}">the whole report</a></p>'
        f"{figures}</section>"
    )
    return {"row": row, "originals": originals, "column": Column(family.model, note, panels), "section": section}


def lighter(figure: Any) -> Any:
    """A figure in the size it has on the page: one that is shared should not weigh ten megabytes."""
    from saccade.explain.drawing.overlay import downscale

    across = max(240, 1240 // min(figure.columns, len(figure.panels)))
    return figure._replace(panels=[panel._replace(image=downscale(panel.image, across)) for panel in figure.panels])


def train(minutes: float, out: Path, device: str, seed: int, progress: bool) -> dict[str, Any] | None:
    """A minute on the embedded scenes: from the embedded weights where there are some, else from nothing."""
    import shutil

    from saccade import weights
    from saccade.engine.recipe import load_recipe
    from saccade.engine.train import train as run_training

    folder, pretrained = out / "training", weights.find(LEARNER) is not None
    mark = folder / ".demo"
    if mark.exists():  # an earlier demo's run, and nobody else's
        shutil.rmtree(folder)
    if not folder.exists():
        folder.mkdir(parents=True)
        mark.touch()
    changes = [
        f"model={{name: {LEARNER}, pretrained: {str(pretrained).lower()}}}",
        "data.path=scenes",
        "batch_size=32",
        f"trainer.max_minutes={minutes}",
        f"seed={seed}",
    ]
    finished = run_training(load_recipe(None, changes), folder, False, device, "saccade demo", progress)
    if not finished.result:
        return None
    best, chance = finished.result["best"]["top1"], 100 / finished.result["classes"]
    return {"top1": best, "chance": chance, "pretrained": pretrained, "page": "training/report.html"}


def write_page(seen: list[dict[str, Any]], trained: dict[str, Any] | None, out: Path) -> Path:
    """index.html: the overview, the numbers, what was learned, and each family's own figure."""
    from saccade.explain.drawing.figure import write_atomic
    from saccade.explain.overview import STYLE, overview
    from saccade.explain.report import document, table

    rows = [one["row"] for one in seen]
    heads = ["model", "M parameters", *SHOWN, "ms a photograph", "tokens", "for pixels"]
    cells = [
        [
            f'<a href="{row["page"]}">{row["model"]}</a>',
            f"{row['params'] / 1e6:.1f}",
            *(first_answer(row, photo) for photo in SHOWN),
            f"{row['milliseconds']:.0f}",
            f"{row['tokens']}",
            f"{row['pixels']:,}",
        ]
        for row in rows
    ]
    learned = ""
    if trained:
        begun = "from its embedded weights" if trained["pretrained"] else "from nothing"
        learned = (
            f"<h2>And they learn</h2><p>A short training {begun} on rendered scenes took <code>{LEARNER}</code> to "
            f"{trained['top1']:.0f} % top-1; chance is {trained['chance']:.0f} %. "
            f'<a href="{trained["page"]}">Its report</a>.</p>'
        )
    body = (
        f"<style>{STYLE}</style><main>"
        '<h1 class="large">A few tokens instead of every pixel</h1>'
        '<p class="lead">Four families of vision models look at the same photographs. Each groups the pixels into a '
        "few tokens and thinks in those. Every pixel here has the colour of the token that leads there.</p>"
        + honesty(rows)
        + overview(seen[0]["originals"], [one["column"] for one in seen])
        + "<h2>In numbers</h2>"
        + table(heads, cells, (1, 4, 5, 6))
        + learned
        + "".join(one["section"] for one in seen)
        + "</main>"
    )
    return write_atomic(out / "index.html", document("saccade: a few tokens instead of every pixel", body))


def honesty(rows: list[dict[str, Any]]) -> str:
    """What these models can and cannot know."""
    fresh = [row["model"] for row in rows if not row["trained"]]
    if len(fresh) == len(rows):
        return (
            '<p class="warn">The models have fresh weights: the pictures show how they group, not what they know, and '
            "their answers are left out.</p>"
        )
    known = (
        '<p class="soft">Small models, trained in minutes on small pictures: their answers are theirs, right or wrong.'
    )
    if fresh:
        known += f" {', '.join(fresh)}: fresh weights, which show how they group; their answers are left out."
    return known + "</p>"


def first_answer(row: dict[str, Any], photo: str) -> str:
    """What a model says first about a photograph."""
    from html import escape

    answers = row["predictions"].get(photo)
    return f"{escape(answers[0]['class'])} {answers[0]['probability']:.0%}" if answers else "fresh weights"


def print_table(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD, caption="tokens that stand for the pixels of the first feature map; ms a forward"
    )
    table.add_column("model")
    for photo in SHOWN:
        table.add_column(photo)
    for column in ("ms", "tokens", "pixels"):
        table.add_column(column, justify="right")
    for row in rows:
        said = [first_answer(row, photo) for photo in SHOWN]
        table.add_row(row["model"], *said, *(f"{row[k]:,.0f}" for k in ("milliseconds", "tokens", "pixels")))
    Console().print(table)
