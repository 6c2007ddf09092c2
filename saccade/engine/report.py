"""report.html: a finished run as one self-contained page."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from saccade._files import write_file
from saccade.data.decode.image import BadImage
from saccade.engine.module import TrainingModule
from saccade.engine.recipe import Recipe, to_yaml
from saccade.engine.results import METRIC_NAMES
from saccade.reports.charts import classes_section, line_chart
from saccade.reports.page import part, render
from saccade.tasks.evaluators import Evaluation
from saccade.tasks.segmentation_drawing import class_colours


def write_report(
    path: Path, result: dict[str, Any], rows: Sequence[dict[str, Any]], sections: list[tuple[str, Any]], recipe: Recipe
) -> None:
    """Write the page; `rows` are those of metrics.csv, `sections` those of the task."""
    environment = result["machine"] | {"command": result["command"] or "saccade.train(…)"}
    curves, facts = _curves(rows, result["score"], ema=recipe.ema.decay > 0), _facts(result)
    values = {"environment": environment, "recipe": to_yaml(recipe), "sections": sections}
    write_file(path, render("training.html", result=result, facts=facts, curves=curves, **values))


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
    measured = {"train_images_per_s": ("{:,.0f}", "images/s, training")}
    measured |= {"loader_images_per_s": ("{:,.0f}", "images/s, data loader alone")}
    measured |= {"memory_gib": ("{:.1f} GiB", "peak GPU memory"), "unreadable": ("{}", "unreadable images")}
    facts += [(text.format(result[key]), name) for key, (text, name) in measured.items() if result[key] is not None]
    return facts


def _curves(rows: Sequence[dict[str, Any]], score: str, ema: bool) -> list[Any]:
    def series(name: str, key: str) -> tuple[str, list[float], list[float]]:
        points = [row for row in rows if row.get(key) is not None]
        return name, [row["epoch"] for row in points], [row[key] for row in points]

    validation = "validation (EMA)" if ema else "validation"
    metric = [series("training", f"train_{score}"), series(validation, f"val_{score}")]
    return [
        line_chart("Loss", [series("training", "train_loss"), series(validation, "val_loss")], "epoch"),
        line_chart(f"{METRIC_NAMES[score]}, %", metric, "epoch"),
        line_chart("Learning rate", [series("learning rate", "lr")], "epoch"),
        line_chart("Throughput, images/s", [series("training", "images_per_s")], "epoch"),
    ]


@torch.inference_mode()
def task_sections(module: TrainingModule, model: nn.Module, evaluation: Evaluation) -> list[tuple[str, Any]]:
    """Return titles and markup: metrics per class, then the worst and the best predictions."""
    if not evaluation.per_class:  # data without labels
        return []
    classes, images = module.sources.classes, evaluation.images
    confusion = [] if evaluation.confusion is None else evaluation.confusion.tolist()
    sections = [("Classes", classes_section(evaluation.per_class, confusion, classes, module.class_metric))]
    for title, rows in zip(module.example_titles, module.rank_examples(images), strict=True):
        figures = []
        for row in rows[: module.num_examples]:
            with suppress(BadImage):
                figures += module.example(model, {name: values[row].tolist() for name, values in images.items()})
        sections.append((title, part("grid", figures, module.example_side)))
    if module.recipe.task == "segmentation":
        colours = list(zip(classes, class_colours(len(classes)).tolist(), strict=True))
        sections[1] = (sections[1][0], part("legend", colours) + sections[1][1])
    return sections
