"""report.html: a finished run as one self-contained page."""

import io
from collections.abc import Sequence
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
from saccade.reports.charts import line_chart, matrix_chart
from saccade.reports.page import Thumbnail, data_url, part, render
from saccade.tasks.segmentation_drawing import class_colours

NUM_EXAMPLES = 12  # images per section, and rows in the table of confusions
MAX_MATRIX_CLASSES = 60  # classes up to which the confusion matrix is drawn


def write_report(
    path: Path,
    result: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    task_sections: Sequence[tuple[str, Any]],
    recipe: Recipe,
) -> None:
    """Write the page; `rows` are those of metrics.csv, `task_sections` titles and markup."""
    environment = result["machine"] | {"command": result["command"] or "saccade.train(…)"}
    page = render(
        "training.html",
        result=result,
        facts=_facts(result),
        curves=_curves(rows, result["score"], ema=recipe.ema.decay > 0),
        sections=task_sections,
        environment=environment,
        recipe=to_yaml(recipe),
    )
    write_text(path, page)


def _facts(result: dict[str, Any]) -> list[tuple[str, str]]:
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
    return facts


def _curves(rows: Sequence[dict[str, Any]], score: str, ema: bool) -> list[Any]:
    def series(name: str, key: str) -> tuple[str, list[float], list[float]]:
        points = _thin([row for row in rows if row.get(key) is not None])
        return name, [row["epoch"] for row in points], [row[key] for row in points]

    validation = "validation (EMA)" if ema else "validation"
    metric = [series("training", f"train_{score}"), series(validation, f"val_{score}")]
    return [
        line_chart("Loss", [series("training", "train_loss"), series(validation, "val_loss")], "epoch"),
        line_chart(f"{METRIC_NAMES[score]}, %", metric, "epoch"),
        line_chart("Learning rate", [series("learning rate", "lr")], "epoch"),
        line_chart("Throughput, images/s", [series("training", "images_per_s")], "epoch"),
    ]


def _thin(rows: list[dict[str, Any]], limit: int = 400) -> list[dict[str, Any]]:
    """Return every n-th row and the last one, about `limit` in all."""
    step = -(-len(rows) // limit) or 1
    return rows[::step] + (rows[-1:] if (len(rows) - 1) % step else [])


def classes_section(values: Sequence[float | None], confusion: Tensor | None, classes: list[str], metric: str) -> Any:
    """Return bars of a metric per class (percent) and the confusion matrix, which counts (true, predicted) pairs."""
    measured = [(name, value) for name, value in zip(classes, values, strict=True) if value is not None]
    bars = [(name, value / 100, f"{value:.1f}") for name, value in sorted(measured, key=lambda entry: entry[1])]
    matrix = [] if confusion is None else confusion.tolist()
    drawn = matrix_chart(matrix, classes) if matrix and len(classes) <= MAX_MATRIX_CLASSES else ""
    return part("classes", metric, bars, drawn, _most_confused(matrix, classes))


def _most_confused(matrix: list[list[int]], classes: list[str]) -> list[tuple[str, str, int]]:
    """Return the most frequent pairs of true and predicted class with their count."""
    counts = [(times, i, j) for i, row in enumerate(matrix) for j, times in enumerate(row) if i != j and times]
    return [(classes[i], classes[j], times) for times, i, j in sorted(counts, reverse=True)[:NUM_EXAMPLES]]


def examples_section(evaluation: Evaluation, source: Source, worst: bool) -> Any:
    """Return the errors with the highest loss, or the correct predictions with the lowest."""
    correct = evaluation.predicted == evaluation.labels
    order = evaluation.losses.argsort(descending=worst)
    figures = []
    for i in [int(i) for i in order if bool(correct[i]) != worst][:NUM_EXAMPLES]:
        index = int(evaluation.indices[i])
        label, predicted = source.classes[int(evaluation.labels[i])], source.classes[int(evaluation.predicted[i])]
        caption = f"{predicted} {float(evaluation.confidence[i]):.0%}" + (f"\ntrue: {label}" if worst else "")
        try:
            figures.append(image_figure(middle_frame(source.read(index)), source.name(index), caption))
        except BadImage:
            continue
    return image_grid(figures)


def image_grid(figures: Sequence[Thumbnail], side: int = 108) -> Any:
    """Return images in rows, each at least `side` px wide."""
    return part("grid", figures, side)


def legend(classes: Sequence[str]) -> Any:
    """Return the colours of the classes of a segmentation."""
    return part("legend", list(zip(classes, class_colours(len(classes)).tolist(), strict=True)))


def image_figure(image: Image.Image, name: str, caption: str, side: int = 128) -> Thumbnail:
    """Return an image, resized to `side` px, with its caption; enlarged with visible pixels if it is smaller."""
    factor = side / max(image.size)
    size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
    image = image.resize(size, Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    label, _, note = caption.partition("\n")
    return Thumbnail(data_url(buffer.getvalue(), "jpeg"), label, note, name=name)
