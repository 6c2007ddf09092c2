"""`saccade demo`: all four families on the bundled photographs and a minute of training, as one HTML page."""

import argparse
import time
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

HELP = "run all four families on the bundled photographs, train one for a minute, write one HTML page"
EXAMPLE = "saccade demo --out demo"
EXPLAINED = ("cat", "coffee")  # photographs with a full report and a column in the table
PANEL_WIDTH = 400  # pixels, in the overview


class Family(NamedTuple):
    """A family: its nano model, the larger one shown when no weights are embedded, and its most telling figure."""

    small: str
    large: str
    figure: str

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
TRAINED_MODEL = "svit_nano"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--train-minutes", type=float, default=1.0, help="length of the training run; 0 skips it (default: 1)"
    )


def run(args: argparse.Namespace) -> int:
    from saccade.cli import pick_device, print_json

    out, device = Path(args.out or "demo"), pick_device(args.device)
    results, steps = [], len(FAMILIES) + bool(args.train_minutes)
    for number, family in enumerate(FAMILIES, 1):
        report(f"[{number}/{steps}] {family.model} on the bundled photographs", args.json)
        results.append(run_family(family, out, device, args.seed))
    trained = None
    if args.train_minutes:
        report(f"[{steps}/{steps}] training {TRAINED_MODEL} on rendered scenes, {args.train_minutes:g} min", args.json)
        trained = train(args.train_minutes, out, device, args.seed, not args.json)
    page = write_page(results, trained, out)
    rows = [result["row"] for result in results]
    if args.json:
        print_json({"models": rows, "training": trained, "page": str(page)})
        return 0
    print_table(rows)
    print(f"open {page.resolve()}")
    return 0


def report(line: str, quiet: bool) -> None:
    if not quiet:
        print(line, flush=True)


def run_family(family: Family, out: Path, device: str, seed: int) -> dict[str, Any]:
    """Run one family on all photographs: its table row, its overview column and its section of the page."""
    from saccade.data.decode.image import read_image
    from saccade.data.synthetic.photos import photo_paths
    from saccade.explain.drawing.figure import Panel
    from saccade.explain.drawing.overlay import downscale
    from saccade.explain.explanation import explain
    from saccade.explain.overview import Column
    from saccade.explain.report import figure_html
    from saccade.explain.subject import load_subject
    from saccade.web.inspection import Stage, inspect_image, mosaic_image

    start, photos = time.perf_counter(), photo_paths()
    subject = load_subject(family.model, device=device, seed=seed)
    originals, panels, predictions, times = [], [], {}, []
    stages: list[Stage] = []
    for name, path in photos.items():
        inspection = inspect_image(subject, read_image(path), name)
        stages = inspection.stages
        top = inspection.predictions if subject.trained else []
        predictions[name] = [{"class": label, "probability": round(value, 4)} for label, value in top]
        times.append(inspection.seconds)
        text = [f"{label} {value:.0%}" for label, value in top[:3]]
        originals.append(Panel(downscale(inspection.image, PANEL_WIDTH), name))
        mosaic = downscale(mosaic_image(inspection, len(stages)), PANEL_WIDTH)
        panels.append(Panel(mosaic, text[0] if text else "", "\n".join(text[1:])))
    pixels = prod(stages[0].step.trace.size)
    explained = explain(
        [photos[photo] for photo in EXPLAINED], family.model, importance=("gradient",), device=device, seed=seed
    )
    page = explained.save(out / family.model)
    figures = "".join(figure_html(shrink(image.figures[family.figure])) for image in explained.images)
    row = {
        "model": family.model,
        "trained": subject.trained,
        "params": explained.parameters,
        "predictions": predictions,
        "milliseconds": round(
            1000 * sorted(times)[len(times) // 2], 1
        ),  # median over the photographs, one forward pass
        "tokens": stages[0].step.count,
        "pixels": pixels,
        "seconds": round(time.perf_counter() - start, 1),
        "page": f"{family.model}/{page.name}",
    }
    note = f"{stages[0].step.count} tokens for {pixels:,} pixels"
    section = (
        f'<section class="image"><h2>{family.model}</h2><p><a href="{row["page"]}">full report</a></p>'
        f"{figures}</section>"
    )
    return {"row": row, "originals": originals, "column": Column(family.model, note, panels), "section": section}


def shrink(figure: Any) -> Any:
    """Resize the panels of a figure to their size on the page, to limit the file size."""
    from saccade.explain.drawing.overlay import downscale

    width = max(240, 1240 // min(figure.columns, len(figure.panels)))
    return figure._replace(panels=[panel._replace(image=downscale(panel.image, width)) for panel in figure.panels])


def train(minutes: float, out: Path, device: str, seed: int, progress: bool) -> dict[str, Any] | None:
    """Train on the built-in scenes, from embedded weights if there are any; return accuracy and report."""
    import shutil

    from saccade import weights
    from saccade.engine.recipe import load_recipe
    from saccade.engine.train import train as run_training

    folder, pretrained = out / "training", weights.find(TRAINED_MODEL) is not None
    marker = folder / ".demo"
    if marker.exists():  # only delete a run that an earlier demo wrote
        shutil.rmtree(folder)
    if not folder.exists():
        folder.mkdir(parents=True)
        marker.touch()
    changes = [
        f"model={{name: {TRAINED_MODEL}, pretrained: {str(pretrained).lower()}}}",
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


def write_page(results: list[dict[str, Any]], trained: dict[str, Any] | None, out: Path) -> Path:
    """Write index.html: overview, table, training result and one section per family."""
    from saccade.explain.drawing.figure import write_atomic
    from saccade.explain.overview import STYLE, overview
    from saccade.reports.page import document, table

    rows = [result["row"] for result in results]
    heads = ["model", "M parameters", *EXPLAINED, "ms per image", "tokens", "pixels"]
    cells = [
        [
            f'<a href="{row["page"]}">{row["model"]}</a>',
            f"{row['params'] / 1e6:.1f}",
            *(top_prediction(row, photo) for photo in EXPLAINED),
            f"{row['milliseconds']:.0f}",
            f"{row['tokens']}",
            f"{row['pixels']:,}",
        ]
        for row in rows
    ]
    training = ""
    if trained:
        start = "from its embedded weights" if trained["pretrained"] else "from scratch"
        training = (
            f"<h2>Training</h2><p>A short run {start} on rendered scenes: <code>{TRAINED_MODEL}</code> reaches "
            f"{trained['top1']:.0f} % top-1; chance is {trained['chance']:.0f} %. "
            f'<a href="{trained["page"]}">Training report</a>.</p>'
        )
    body = (
        f"<style>{STYLE}</style><main>"
        '<h1 class="large">A few tokens instead of every pixel</h1>'
        '<p class="lead">Four families of vision models on the same photographs. Each groups pixels into a few tokens '
        "and relates the tokens. Every pixel has the colour of its strongest token.</p>"
        + weights_notice(rows)
        + overview(results[0]["originals"], [result["column"] for result in results])
        + "<h2>Measurements</h2>"
        + table(heads, cells, (1, 4, 5, 6))
        + training
        + "".join(result["section"] for result in results)
        + "</main>"
    )
    return write_atomic(out / "index.html", document("saccade: a few tokens instead of every pixel", body))


def weights_notice(rows: list[dict[str, Any]]) -> str:
    """Return a paragraph on which models are trained and which are randomly initialised."""
    untrained = [row["model"] for row in rows if not row["trained"]]
    if len(untrained) == len(rows):
        return (
            '<p class="warn">All models are randomly initialised: the figures show how they group pixels, not what '
            "they have learned. Predictions are omitted.</p>"
        )
    text = '<p class="soft">Small models trained for minutes on small images; predictions are shown as they are.'
    if untrained:
        text += f" Randomly initialised, predictions omitted: {', '.join(untrained)}."
    return text + "</p>"


def top_prediction(row: dict[str, Any], photo: str) -> str:
    """Return the most probable class of a photograph, or "untrained"."""
    from html import escape

    predictions = row["predictions"].get(photo)
    return f"{escape(predictions[0]['class'])} {predictions[0]['probability']:.0%}" if predictions else "untrained"


def print_table(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, caption="tokens, pixels: first feature map; ms: one forward pass")
    table.add_column("model")
    for photo in EXPLAINED:
        table.add_column(photo)
    for column in ("ms", "tokens", "pixels"):
        table.add_column(column, justify="right")
    for row in rows:
        predictions = [top_prediction(row, photo) for photo in EXPLAINED]
        table.add_row(row["model"], *predictions, *(f"{row[k]:,.0f}" for k in ("milliseconds", "tokens", "pixels")))
    Console().print(table)
