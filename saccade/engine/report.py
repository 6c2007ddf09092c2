"""report.html: a finished run as one self-contained page."""

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from saccade.data.decode.image import BadImage
from saccade.data.decode.video import middle_frame
from saccade.data.sources.base import Source
from saccade.engine.recipe import Recipe, to_yaml
from saccade.engine.results import METRIC_NAMES, write_text
from saccade.engine.tasks.evaluate_classifier import Evaluation
from saccade.reports.charts import bar_chart, line_chart, matrix_chart

NUM_EXAMPLES = 12  # images per section, and rows in the table of confusions
MAX_MATRIX_CLASSES = 60  # classes up to which the confusion matrix is drawn

STYLE = """
:root { --ink: #1b1f24; --soft: #667080; --paper: #fff; --card: #f5f6f8; --edge: #d9dde3;
  --line-0: #2563eb; --line-1: #e2571e; --line-2: #16915b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --soft: #9aa3b0; --paper: #14171b; --card: #1d2127;
  --edge: #343a43; --line-0: #6ea0ff; --line-1: #ff8a5c; --line-2: #4ccb90; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1020px; padding: 24px 20px 60px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 26px; margin: 0 0 2px; } h2 { font-size: 18px; margin: 34px 0 10px; }
p.lead, .soft { color: var(--soft); margin: 0 0 14px; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 10px; }
.fact { background: var(--card); border-radius: 8px; padding: 10px 12px; }
.fact b { display: block; font-size: 21px; } .fact span { color: var(--soft); font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); gap: 16px; }
.charts > * { background: var(--card); border-radius: 8px; padding: 10px; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--ink); font-family: system-ui, sans-serif; }
svg .title { font-size: 13px; font-weight: 600; } svg .small { font-size: 11px; fill: var(--soft); }
svg .tiny { font-size: 9px; } svg .grid { stroke: var(--edge); stroke-width: 1; }
svg .edge { fill: none; stroke: var(--edge); }
.images { display: grid; grid-template-columns: repeat(auto-fill, minmax(108px, 1fr)); gap: 10px; }
figure { margin: 0; } figure img { width: 100%; border-radius: 6px; display: block; image-rendering: auto; }
figcaption { font-size: 12px; line-height: 1.35; margin-top: 3px; overflow-wrap: anywhere; }
table { border-collapse: collapse; } td, th { text-align: left; padding: 3px 14px 3px 0; vertical-align: top; }
pre { background: var(--card); border-radius: 8px; padding: 12px; overflow-x: auto; font-size: 12.5px; }
.scroll { max-height: 520px; overflow-y: auto; }
"""


def write_report(
    path: Path,
    result: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    task_sections: Sequence[tuple[str, str]],
    recipe: Recipe,
) -> None:
    """Write the page; `rows` are those of metrics.csv, `task_sections` titles and HTML."""
    model, data = escape(result["model"]), escape(result["data"])
    sections = [
        f"<h1>{model} on {data}</h1>",
        f'<p class="lead">{escape(result["machine"]["device"])} · torch {escape(result["machine"]["torch"])} · '
        f"{escape(result['machine']['date'])}</p>",
        _facts(result),
        "<h2>Curves</h2>",
        _curves(rows, result["score"], ema=recipe.ema.decay > 0),
        *(f"<h2>{escape(title)}</h2>{content}" for title, content in task_sections),
        _unreadable(result["unreadable_images"]),
        "<h2>Environment</h2>",
        _table(result["machine"] | {"command": result["command"] or "saccade.engine.train.train(…)"}),
        "<h2>Recipe</h2>",
        f"<pre>{escape(to_yaml(recipe))}</pre>",
    ]
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{model} on {data}</title><style>{STYLE}</style></head><body>{''.join(sections)}</body></html>\n"
    )
    write_text(path, page)


def _facts(result: dict[str, Any]) -> str:
    final, best = result["final"], result["best"]
    score = result["score"]
    further = [key for key in final if key in METRIC_NAMES and key not in ("loss", score)]
    facts = [(f"{final[score]:.2f} %", f"{METRIC_NAMES[score]}, {final['count']:,} images")]
    facts += [(f"{final[key]:.2f} %", METRIC_NAMES[key]) for key in further]
    if best:
        facts.append((f"{best[score]:.2f} %", f"best {METRIC_NAMES[score]}, step {int(best['step']):,}"))
    facts += [
        (f"{result['minutes']:.1f} min", f"{result['epochs']:g} epochs, {result['steps']:,} steps"),
        (f"{result['parameters'] / 1e6:.2f} M", "parameters"),
        (f"{result['multiply_adds'] / 1e6:,.0f} M", f"multiply-adds, {result['image_size']} px"),
    ]
    if result["train_images_per_s"]:
        facts.append((f"{result['train_images_per_s']:,.0f}", "images/s, training"))
    if result["loader_images_per_s"]:
        facts.append((f"{result['loader_images_per_s']:,.0f}", "images/s, data loader alone"))
    if result["memory_gib"]:
        facts.append((f"{result['memory_gib']:.1f} GiB", "peak GPU memory"))
    facts.append((f"{result['unreadable']}", "unreadable images"))
    cells = "".join(
        f'<div class="fact"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in facts
    )
    return f'<div class="facts">{cells}</div>'


def _curves(rows: Sequence[dict[str, Any]], score: str, ema: bool) -> str:
    def series(name: str, key: str) -> tuple[str, list[float], list[float]]:
        points = _thin([row for row in rows if row.get(key) is not None])
        return name, [row["epoch"] for row in points], [row[key] for row in points]

    validation = "validation (EMA)" if ema else "validation"
    metric = [series("training", f"train_{score}"), series(validation, f"val_{score}")]
    charts = [
        line_chart("Loss", [series("training", "train_loss"), series(validation, "val_loss")], "epoch"),
        line_chart(f"{METRIC_NAMES[score]}, %", metric, "epoch"),
        line_chart("Learning rate", [series("learning rate", "lr")], "epoch"),
        line_chart("Throughput, images/s", [series("training", "images_per_s")], "epoch"),
    ]
    note = '<p class="soft">Training loss and accuracy are measured on augmented (and mixed) images.</p>'
    return f'<div class="charts">{"".join(f"<div>{chart}</div>" for chart in charts if chart)}</div>{note}'


def _thin(rows: list[dict[str, Any]], limit: int = 400) -> list[dict[str, Any]]:
    """Return every n-th row and the last one, about `limit` in all."""
    step = -(-len(rows) // limit) or 1
    return rows[::step] + (rows[-1:] if (len(rows) - 1) % step else [])


def classes_section(values: Sequence[float | None], confusion: Tensor | None, classes: list[str], metric: str) -> str:
    """Return bars of a metric per class (percent) and the confusion matrix, which counts (true, predicted) pairs."""
    measured = [(name, value) for name, value in zip(classes, values, strict=True) if value is not None]
    bars = bar_chart([(name, value, f"{value:.1f} %") for name, value in sorted(measured, key=lambda entry: entry[1])])
    per_class = f'<b>{metric} per class, %</b><div class="scroll">{bars}</div>'
    blocks = []
    if confusion is not None:
        matrix = confusion.tolist()
        if len(classes) <= MAX_MATRIX_CLASSES:
            title = "<b>Confusion, %: true class by row, prediction by column</b>"
            blocks.append(title + matrix_chart(matrix, classes))
        per_class += f"<p><b>Most frequent confusions</b></p>{_most_confused(matrix, classes)}"
    return f'<div class="charts">{"".join(f"<div>{block}</div>" for block in [*blocks, per_class])}</div>'


def _most_confused(matrix: list[list[int]], classes: list[str]) -> str:
    count = len(classes)
    pairs = ((matrix[i][j], classes[i], classes[j]) for i in range(count) for j in range(count) if i != j)
    lines = "".join(
        f"<tr><td>{escape(true)}</td><td>{escape(predicted)}</td><td>{times}</td></tr>"
        for times, true, predicted in sorted(pairs, reverse=True)[:NUM_EXAMPLES]
        if times
    )
    return f"<table><tr><th>true</th><th>predicted</th><th>count</th></tr>{lines}</table>"


def examples_section(evaluation: Evaluation, source: Source, worst: bool) -> str:
    """Return the errors with the highest loss, or the correct predictions with the lowest."""
    correct = evaluation.predicted == evaluation.labels
    order = evaluation.losses.argsort(descending=worst)
    figures = []
    for i in [int(i) for i in order if bool(correct[i]) != worst][:NUM_EXAMPLES]:
        index = int(evaluation.indices[i])
        label, predicted = source.classes[int(evaluation.labels[i])], source.classes[int(evaluation.predicted[i])]
        confidence = f"{100 * float(evaluation.confidence[i]):.0f} %"
        caption = f"{escape(label)} ({confidence})"
        if worst:
            caption = f"{escape(label)}, predicted <b>{escape(predicted)}</b> ({confidence})"
        try:
            figures.append(image_figure(middle_frame(source.read(index)), source.name(index), caption))
        except BadImage:
            continue
    return image_grid(figures)


def image_grid(figures: Sequence[str], side: int = 108) -> str:
    """Return HTML figures in rows, each at least `side` px wide."""
    if not figures:
        return '<p class="soft">None.</p>'
    columns = f"grid-template-columns: repeat(auto-fill, minmax({side}px, 1fr))"
    return f'<div class="images" style="{columns}">{"".join(figures)}</div>'


def image_figure(image: Image.Image, name: str, caption: str, side: int = 128) -> str:
    """Return an image with its caption (HTML) as an HTML figure."""
    name = escape(name)
    url = _data_url(image, side)
    return f'<figure><img src="{url}" alt="{name}" title="{name}"><figcaption>{caption}</figcaption></figure>'


def _unreadable(reasons: list[str]) -> str:
    if not reasons:
        return ""
    lines = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    return f"<h2>Unreadable images</h2><ul>{lines}</ul>"


def _data_url(image: Image.Image, side: int) -> str:
    """Return the image as a data URL, resized to `side` px; enlarged with visible pixels if it is smaller."""
    factor = side / max(image.size)
    size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
    image = image.resize(size, Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def _table(values: dict[str, Any]) -> str:
    lines = "".join(f"<tr><th>{escape(str(k))}</th><td>{escape(str(v))}</td></tr>" for k, v in values.items())
    return f"<table>{lines}</table>"
