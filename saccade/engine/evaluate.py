"""`saccade.evaluate`: metrics of a model of any task on a data set, by the papers' protocol."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from saccade.data.loader import EvalLoader, ObjectEvalLoader
from saccade.data.open import (
    check_source,
    find_mask_splits,
    find_object_splits,
    find_splits,
    find_video_splits,
    limited,
    open_split,
    open_train_and_val,
)
from saccade.data.open.splits import EVAL_NAMES, TRAIN_NAMES
from saccade.data.sources.base import DataError
from saccade.data.sources.masks import load_pair
from saccade.data.transforms.mask import EvalPair
from saccade.engine.loaders import UnreadableImages, evaluation_loader
from saccade.engine.recipe import Recipe, load_recipe
from saccade.engine.tasks.evaluate_classifier import evaluate_classifier
from saccade.engine.tasks.evaluate_detector import coco_metric, evaluate_detector
from saccade.engine.tasks.evaluate_segmenter import evaluate_segmenter
from saccade.engine.tasks.evaluation import check_num_classes
from saccade.models.card import Card
from saccade.tasks.load import card_of, load
from saccade.tasks.predict import check_options
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


class EvaluationData(NamedTuple):
    """The part of a data set that is evaluated."""

    source: Any
    split: str  # its name, for people
    trained_on: bool  # whether the model was trained on these images


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
    card, chosen = card_of(module), EvaluateOptions(**options)
    check_options(chosen._asdict(), EvaluateOptions._field_defaults, card.task)
    recipe = recipe_of(module)
    opened = open_evaluation_data(card, data, split, recipe, data_options or {}, chosen.size)
    source = limited(opened.source, limit, 0)
    if opened.trained_on:
        _logger.warning(
            "the model was trained on these images: the result says nothing about new ones. Evaluate another split."
        )
    check_num_classes(card, source.classes)
    check_source(source, "evaluation")
    target = torch.device(device) if device is not None else next(module.parameters()).device
    run = _Run(module, card, source, chosen, recipe, batch_size, workers, target, dtype, max_unreadable, on_progress)
    evaluation, details = run.evaluate()
    if out is not None and card.task == "detection":
        Path(out).mkdir(parents=True, exist_ok=True)
        details["results"] = [str(file) for file in evaluation.coco.write(out)]
    return {
        "task": card.task,
        "model": f"{card.name}+{card.head}" if card.head else card.name,
        "data": str(data),
        "split": opened.split,
        "trained_on": opened.trained_on,
        **evaluation.summary(),
        **details,
    }


class _Run(NamedTuple):
    """One evaluation: everything that the three tasks share."""

    model: nn.Module
    card: Card
    source: Any
    options: EvaluateOptions
    recipe: Recipe | None
    batch_size: int
    workers: int | None
    device: torch.device
    dtype: torch.dtype | None
    max_unreadable: int
    on_progress: Callable[[int, int], None] | None

    def evaluate(self) -> tuple[Any, dict[str, Any]]:
        """The evaluation, and what was chosen for it."""
        task = {"classification": self._classify, "segmentation": self._segment, "detection": self._detect}
        return task[self.card.task]()

    def _classify(self) -> tuple[Any, dict[str, Any]]:
        default, options = self.card.preprocess, self.options
        preprocess = default._replace(size=options.size or default.size, crop_pct=options.crop_pct or default.crop_pct)
        batches = evaluation_loader(self.source, preprocess, self.batch_size, self.workers, self.device, options.views)
        evaluation = evaluate_classifier(
            self.model, self._counted(batches), self.card.num_classes, preprocess, *self._common(), options.flip
        )
        details = {"size": preprocess.size, "crop_pct": preprocess.crop_pct, "flip": options.flip}
        return evaluation, details | self._per_class("top-1 %", evaluation.per_class)

    def _segment(self) -> tuple[Any, dict[str, Any]]:
        options = self.options
        inference = InferenceOptions(options.window or 0, options.stride, tuple(options.scales), options.flip)
        pin = self.device.type == "cuda"
        batches = EvalLoader(self.source, EvalPair(), 1, self.workers, pin_memory=pin, load=load_pair)
        shorter = options.size or self.card.shorter
        evaluation = evaluate_segmenter(
            self.model,
            self._counted(batches),
            self.source.classes,
            self.card.preprocess,
            shorter,
            inference,
            *self._common(),
        )
        per_class = [None if value is None else 100 * value for value in evaluation.scores.iou]
        return evaluation, {"size": shorter, "inference": inference._asdict()} | self._per_class("IoU %", per_class)

    def _detect(self) -> tuple[Any, dict[str, Any]]:
        limit = self.options.max_detections
        if limit is None:
            limit = self.recipe.data.max_detections if self.recipe else 100
        batch_size = min(self.batch_size, MAX_DETECTION_BATCH)
        batches = ObjectEvalLoader(self.source, batch_size, self.workers, pin_memory=self.device.type == "cuda")
        coco = coco_metric(self.model, self.source, limit)
        evaluation = evaluate_detector(
            self.model, self._counted(batches), self.source, coco, *self._common(), self.options.size
        )
        return evaluation, {"max_detections": limit} | self._per_class("box AP %", evaluation.per_class)

    def _common(self) -> tuple[torch.device, torch.dtype | None, UnreadableImages]:
        return self.device, self.dtype, UnreadableImages(self.max_unreadable)

    def _counted(self, batches: Iterable[Any]) -> Iterator[Any]:
        done = 0
        for batch in batches:
            yield batch
            done += len(batch.labels) + len(batch.bad)
            if self.on_progress:
                self.on_progress(done, len(self.source))

    def _per_class(self, measure: str, values: Iterable[float | None]) -> dict[str, Any]:
        rounded = [None if value is None else round(value, 2) for value in values]
        return {"measure": measure, "per_class": dict(zip(self.source.classes, rounded, strict=True))}


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
    find: Callable[..., dict[str, Any]] = {
        "classification": find_video_splits if card.preprocess.frames else find_splits,
        "segmentation": find_mask_splits,
        "detection": find_object_splits,
    }[card.task]
    supported = [name for name, p in signature(find).parameters.items() if p.default is not p.empty and name != "size"]
    check_data_options(options, supported)
    is_training_data = recipe is not None and same_path(recipe.data.path, data)
    if recipe is not None and is_training_data:
        options = {name: getattr(recipe.data, name) for name in supported if hasattr(recipe.data, name)} | options
    options = {"size": size or card.preprocess.size} | options
    if card.preprocess.frames:
        options["frames"] = card.preprocess.frames
    classes = card.classes or None
    path = Path(data) if str(data) not in ("scenes", "motions") else str(data)
    find = partial(find, **options)  # an option may have the name of a parameter of open_split
    names = list(find(path))
    held_out = next((name for name in EVAL_NAMES if name in names), None)
    if held_out is None and recipe is not None and is_training_data and not recipe.data.val_path:
        fraction, limit = recipe.data.val_fraction, getattr(recipe.data, "limit", None)
        train_name = next((name for name in TRAIN_NAMES if name in names), "train")
        if split in (None, "val", train_name):  # the parts that training made of the data
            parts = open_train_and_val(path, None, fraction, recipe.seed, find, limit)
            if split == train_name:
                return EvaluationData(parts[0], f"the {1 - fraction:.0%} that the model was trained on", True)
            return EvaluationData(parts[1], f"the {fraction:.0%} that training held out", False)
    name = split or held_out or names[0]
    source = open_split(path, split, classes, find)
    trained_on = is_training_data and (name in TRAIN_NAMES or (name == names[0] and held_out is None))
    return EvaluationData(source, name, trained_on)


def check_data_options(options: dict[str, Any], supported: list[str]) -> None:
    """Raise for an unknown option of the data, naming the closest."""
    for key in options:
        if key not in supported:
            close = get_close_matches(key, supported, 1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise DataError(f"unknown data option {key}.{hint} Known options: {', '.join(sorted(supported))}.")


def same_path(first: str | os.PathLike, second: str | os.PathLike) -> bool:
    """Whether two data paths name the same place; embedded sets by their name."""
    return str(first) == str(second) or Path(first).resolve() == Path(second).resolve()
