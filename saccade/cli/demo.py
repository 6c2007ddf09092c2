"""`saccade demo`: all four families on the bundled photographs and a minute of training, as one HTML page."""

import argparse
import time
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from saccade.cli import number

HELP = "run all four families on the bundled photographs, train one for a minute, write one HTML page"
EXAMPLE = "saccade demo --out demo"
FLAGS = ("out", "device", "seed")  # of the shared ones
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
        "--train-minutes", type=number(0), default=1.0, help="length of the training run; 0 skips it (default: 1)"
    )


def run(args: argparse.Namespace) -> int:
    from saccade.cli import pick_device, print_json

    out, device = Path(args.out or "demo"), pick_device(args.device)
    results, steps = [], len(FAMILIES) + bool(args.train_minutes)
    for step, family in enumerate(FAMILIES, 1):
        report(f"[{step}/{steps}] {family.model} on the bundled photographs", args.json)
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
    print_models(rows)
    print(f"open {page.resolve()}")
    return 0


def report(line: str, quiet: bool) -> None:
    if not quiet:
        print(line, flush=True)


def run_family(family: Family, out: Path, device: str, seed: int) -> dict[str, Any]:
    """Run one family on all photographs: its table row, its overview column and its section of the page."""
    from saccade import explain
    from saccade.data import photo_paths, read_image
    from saccade.explanation import (
        Panel,
        Stage,
        downscale,
        figure_section,
        inspect_image,
        load_subject,
        mosaic_image,
        thumbnail,
    )

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
        originals.append(thumbnail(Panel(downscale(inspection.image, PANEL_WIDTH), name)))
        mosaic = downscale(mosaic_image(inspection, len(stages)), PANEL_WIDTH)
        panels.append(thumbnail(Panel(mosaic, text[0] if text else "", "\n".join(text[1:]))))
    pixels = prod(stages[0].step.trace.size)
    explained = explain(
        [photos[photo] for photo in EXPLAINED], family.model, importance=("gradient",), device=device, seed=seed
    )
    page = explained.save(out / family.model)
    figures = [figure_section(shrink(image.figures[family.figure])) for image in explained.images]
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
    return {"row": row, "note": note, "originals": originals, "panels": panels, "figures": figures}


def shrink(figure: Any) -> Any:
    """Resize the panels of a figure to their size on the page, to limit the file size."""
    from saccade.explanation import downscale

    width = max(240, 1240 // min(figure.columns, len(figure.panels)))
    return figure._replace(panels=[panel._replace(image=downscale(panel.image, width)) for panel in figure.panels])


def train(minutes: float, out: Path, device: str, seed: int, progress: bool) -> dict[str, Any] | None:
    """Train on the built-in scenes, from embedded weights if there are any; return accuracy and report."""
    import shutil

    import saccade
    from saccade import weights

    folder, pretrained = out / "training", weights.find(TRAINED_MODEL) is not None
    marker = folder / ".demo"
    if marker.exists():  # only delete a run that an earlier demo wrote
        shutil.rmtree(folder)
    if not folder.exists():
        folder.mkdir(parents=True)
        marker.touch()
    finished = saccade.train(
        out=folder,
        model=TRAINED_MODEL,
        data="scenes",
        device=device,
        progress=progress,
        command="saccade demo",
        pretrained=pretrained,
        epochs=10,
        batch=32,
        lr=1e-3,
        seed=seed,
        trainer={"max_minutes": minutes},
    )
    if not finished.result:
        return None
    best, chance = finished.result["best"]["top1"], 100 / finished.result["classes"]
    page = "training/report.html"
    return {"model": TRAINED_MODEL, "top1": best, "chance": chance, "pretrained": pretrained, "page": page}


def write_page(families: list[dict[str, Any]], trained: dict[str, Any] | None, out: Path) -> Path:
    """Write index.html: overview, table, training result and one section per family."""
    from saccade._files import write_file
    from saccade.reports import render

    rows = [family["row"] for family in families]
    heads = ("model", "M parameters", *EXPLAINED, "ms per image", "tokens", "pixels")
    cells = [
        (
            row["model"],
            f"{row['params'] / 1e6:.1f}",
            *(top_prediction(row, photo) for photo in EXPLAINED),
            f"{row['milliseconds']:.0f}",
            f"{row['tokens']}",
            f"{row['pixels']:,}",
        )
        for row in rows
    ]
    numeric = (1, *range(len(heads) - 3, len(heads)))
    values = {"heads": heads, "cells": cells, "numeric": numeric, "notice": weights_notice(rows)}
    return write_file(out / "index.html", render("demo.html", families=families, trained=trained, **values))


def weights_notice(rows: list[dict[str, Any]]) -> str:
    """Return which models are trained and which are randomly initialised."""
    untrained = [row["model"] for row in rows if not row["trained"]]
    if len(untrained) == len(rows):
        return (
            "All models are randomly initialised: the figures show how they group pixels, not what they have learned. "
            "Predictions are omitted."
        )
    text = "Small models trained for minutes on small images; predictions are shown as they are."
    return text + (f" Randomly initialised, predictions omitted: {', '.join(untrained)}." if untrained else "")


def top_prediction(row: dict[str, Any], photo: str) -> str:
    """Return the most probable class of a photograph, or "untrained"."""
    predictions = row["predictions"].get(photo)
    return f"{predictions[0]['class']} {predictions[0]['probability']:.0%}" if predictions else "untrained"


def print_models(rows: list[dict[str, Any]]) -> None:
    from saccade.cli import print_table

    cells = [
        (
            row["model"],
            *(top_prediction(row, photo) for photo in EXPLAINED),
            *(f"{row[key]:,.0f}" for key in ("milliseconds", "tokens", "pixels")),
        )
        for row in rows
    ]
    text = ("model", *EXPLAINED)
    caption = "tokens, pixels: first feature map; ms: one forward pass"
    print_table((*text, "ms", "tokens", "pixels"), cells, text, caption=caption)
