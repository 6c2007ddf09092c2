"""`saccade.evaluate`: metrics of a model of any task on a data set, by the papers' protocol."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from saccade.data.loader import EvalLoader, ObjectEvalLoader, UnreadableImages
from saccade.data.open import (
    FINDERS,
    check_data_options,
    check_source,
    finder_options,
    limited,
)
from saccade.data.open.evaluation import EvaluationData, TrainingData, open_held_out
from saccade.data.sources.base import DataError
from saccade.data.sources.masks import load_pair
from saccade.data.synthetic.motions import MotionEvalLoader, MotionSet
from saccade.data.transforms.mask import EvalPair
from saccade.engine.recipe import Recipe, load_recipe
from saccade.models.card import Card
from saccade.tasks.evaluators import (
    ClassEvaluator,
    Evaluator,
    LabelEvaluator,
    MaskEvaluator,
    ObjectEvaluator,
    has_masks,
)
from saccade.tasks.load import card_of, load
from saccade.tasks.predict import check_options, make_eval_transform
from saccade.tasks.segmentation_inference import InferenceOptions

MAX_DETECTION_BATCH = 16
_logger = logging.getLogger(__name__)


class EvaluateOptions(NamedTuple):
    """Options of an evaluation; those of other tasks must keep their defaults."""

    size: int | None = None  # side of the input, in dense tasks its shorter side; default: the card's
    crop_pct: float | None = None  # centre crop / shorter side; default: the card's
    views: tuple[int, int] = (1, 1)  # temporal clips and spatial crops per video; the papers use (4, 3)
    flip: bool = False  # average with the mirrored image
    window: int | None = None  # side of a sliding window; None and 0: the full image
    stride: int = 0  # of the window; 0: 2/3 of it
    scales: tuple[float, ...] = (1.0,)  # average over resized images
    max_detections: int | None = None  # per image and class; default: the run's, or else COCO's 100


def evaluate(
    model: nn.Module | str | os.PathLike,
    data: str | os.PathLike,
    split: str | None = None,
    *,
    batch_size: int = 64,
    workers: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    max_unreadable: int = 100,
    limit: int | None = None,
    out: str | os.PathLike | None = None,
    data_options: dict[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Metrics in percent and per class, with the number of images and the split they were computed on.

    Of the data a model was trained on, the part that training held out is evaluated; a warning is logged and
    `trained_on` is true if there is none.

    Args:
        model: a model, or what `saccade.load` takes.
        data: a path as for training.
        split: "train", "val", "test", …; default: the evaluation split, else what training held out, else everything.
        dtype: of autocast; None computes in the model's own dtype.
        max_unreadable: raise at more unreadable images than this.
        limit: evaluate a balanced subset of at most this many images.
        out: folder for COCO's result files of a detector.
        data_options: of the data, as under `data` in a recipe: image_column, layout, ignore_index, …
        options: of `EvaluateOptions`: size; crop_pct, views (classification); flip (classification and segmentation);
            window, stride, scales (segmentation); max_detections (detection).

    Example:
        >>> model = saccade.create_model("svit_nano", num_classes=10)  # or "runs/first"
        >>> metrics = saccade.evaluate(model, "scenes", limit=20)
        >>> metrics["count"], metrics["split"]
        (20, 'val')
    """
    module = model if isinstance(model, nn.Module) else load(model)
    card, chosen, recipe = card_of(module), EvaluateOptions(**options), recipe_of(module)
    check_options(chosen._asdict(), EvaluateOptions._field_defaults, card.task)
    opened = open_evaluation_data(card, data, split, recipe, data_options or {}, chosen.size)
    source = limited(opened.source, limit, 0)
    if opened.trained_on:
        _logger.warning(
            "the model was trained on these images: the result says nothing about new ones. Evaluate another split."
        )
    check_num_classes(card, source.classes)
    check_source(source, "evaluation")
    target = torch.device(device) if device is not None else next(module.parameters()).device
    evaluator, batches, details = prepare(module, card, source, chosen, recipe, batch_size, workers, target)
    batches = _counted(batches, len(source), on_progress)
    evaluation = evaluator.evaluate(module, batches, target, dtype, UnreadableImages(max_unreadable))
    if out is not None and isinstance(evaluator, ObjectEvaluator):
        Path(out).mkdir(parents=True, exist_ok=True)
        details["results"] = [str(file) for file in evaluator.coco.write(out)]
    per_class = [None if value is None else round(value, 2) for value in evaluation.per_class]
    return {
        "task": card.task,
        "model": f"{card.name}+{card.head}" if card.head else card.name,
        "data": str(data),
        "split": opened.split,
        "trained_on": opened.trained_on,
        **evaluation.summary(),
        **details,
        "per_class": dict(zip(source.classes, per_class, strict=True)),
    }


def prepare(
    model: nn.Module,
    card: Card,
    source: Any,
    options: EvaluateOptions,
    recipe: Recipe | None,
    batch_size: int,
    workers: int | None,
    device: torch.device,
) -> tuple[Evaluator, Iterable[Any], dict[str, Any]]:
    """Return the evaluator, the loader of the complete source, and what was chosen for them."""
    default, pin = card.preprocess, device.type == "cuda"
    if card.task == "classification":
        preprocess = default._replace(size=options.size or default.size, crop_pct=options.crop_pct or default.crop_pct)
        details = {"size": preprocess.size, "crop_pct": preprocess.crop_pct, "flip": options.flip}
        if isinstance(source, MotionSet):
            batches: Iterable[Any] = MotionEvalLoader(source.to(device), batch_size)
        else:
            transform = make_eval_transform(preprocess, options.views)
            batches = EvalLoader(source, transform, batch_size, workers, pin_memory=pin)
        evaluator = (LabelEvaluator if card.multi_label else ClassEvaluator)(card.num_classes, preprocess, options.flip)
        return evaluator, batches, details | {"measure": "AP %" if card.multi_label else "top-1 %"}
    if card.task == "segmentation":
        inference = InferenceOptions(options.window or 0, options.stride, tuple(options.scales), options.flip)
        shorter = options.size or card.shorter
        details = {"size": shorter, "inference": inference._asdict(), "measure": "IoU %"}
        batches = EvalLoader(source, EvalPair(), 1, workers, pin_memory=pin, load=load_pair)
        return MaskEvaluator(source.classes, default, shorter, inference), batches, details
    limit = options.max_detections
    if limit is None:
        limit = recipe.data.max_detections if recipe else 100
    batches = ObjectEvalLoader(source, min(batch_size, MAX_DETECTION_BATCH), workers, pin_memory=pin)
    evaluator = ObjectEvaluator(source, has_masks(model, source), limit, options.size)
    return evaluator, batches, {"max_detections": limit, "measure": "box AP %"}


def _counted(batches: Iterable[Any], total: int, on_progress: Callable[[int, int], None] | None) -> Iterator[Any]:
    done = 0
    for batch in batches:
        yield batch
        done += len(batch.labels) + len(batch.bad)
        if on_progress:
            on_progress(done, total)


def check_num_classes(card: Card, classes: list[str]) -> None:
    """Raise if model and data differ in their number of classes."""
    if len(classes) != card.num_classes:
        raise DataError(f"the model has {card.num_classes} classes, the data has {len(classes)}.")


def recipe_of(model: nn.Module) -> Recipe | None:
    """The recipe next to the weights that `saccade.load` read, None for weights without a run."""
    path: Any = getattr(model, "weights_file", None)
    recipe = Path(path).with_name("recipe.yaml") if path is not None else None
    return load_recipe(recipe) if recipe is not None and recipe.is_file() else None


def open_evaluation_data(
    card: Card,
    data: str | os.PathLike,
    split: str | None,
    recipe: Recipe | None,
    options: dict[str, Any],
    size: int | None = None,
) -> EvaluationData:
    """Open the split to evaluate: the requested one, the evaluation split, or what training held out."""
    find = FINDERS["video" if card.preprocess.frames else card.task][1]
    supported = finder_options(find)
    check_data_options(options, [name for name in supported if name != "multi_label"])  # which the card says
    training = None
    if recipe is not None:
        values = recipe.data
        training = TrainingData(values.path, values.val_path, values.val_fraction, recipe.seed, values.limit)
        if training.is_at(data):
            options = {name: getattr(values, name) for name in supported if hasattr(values, name)} | options
    options = {"size": size or card.preprocess.size} | options
    if "multi_label" in supported:
        options["multi_label"] = card.multi_label
    if card.preprocess.frames:
        options["frames"] = card.preprocess.frames
    # bound here, because an option may have the name of a parameter of open_split
    return open_held_out(data, split, card.classes or None, partial(find, **options), training)
