"""A path -> datasets. `find_*` recognises what is at a path, `open_*` opens and checks it, for every task.

A finder returns {split name: opener}; a path without splits is one split named "all". An opener takes `classes`, the
class names of another split or of a model, or None.
"""

from collections.abc import Callable
from difflib import get_close_matches
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import numpy as np

from saccade.data.open.images import find_splits, find_unlabelled_splits, find_video_splits
from saccade.data.open.masks import find_mask_splits
from saccade.data.open.objects import find_object_splits
from saccade.data.open.splits import (
    EMBEDDED_IMAGES,
    EMBEDDED_VIDEOS,
    Finder,
    choose_split,
    eval_split,
    train_split,
)
from saccade.data.sources.base import (
    DataError,
    DataOptionError,
    Subset,
    check_labels,
    hold_out,
    is_multi_label,
    limited,
)
from saccade.data.sources.masks import check_masks

__all__ = [
    "EMBEDDED_IMAGES",
    "EMBEDDED_VIDEOS",
    "FINDERS",
    "check_data_options",
    "check_source",
    "find_mask_splits",
    "find_object_splits",
    "find_splits",
    "find_unlabelled_splits",
    "find_video_splits",
    "finder_options",
    "limited",
    "open_split",
    "open_train_and_val",
]


def open_train_and_val(
    path: str | Path,
    val_path: str | Path | None = None,
    val_fraction: float = 0.1,
    seed: int = 0,
    find: Finder = find_splits,
    limit: int | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Training and validation sets of a task, checked. Without a validation split, `val_fraction` is held out.

    `find` is the finder of the task, `options` are its own. `limit` is the largest number of samples per set.
    """
    splits = find(path, **options)
    train = train_split(splits)(classes=None)
    check_source(train, "training")
    open_val = eval_split(splits)
    if val_path is not None:
        open_val = choose_split(find(val_path, **options), None, val_path)
    if open_val is not None:
        val = match_classes(open_val(classes=train.classes), train.classes)
    else:
        train, val = hold_out(train, val_fraction, seed)
    train, val = limited(train, limit, seed), limited(val, limit, seed)
    check_source(val, "validation")
    return train, val


def open_split(
    path: str | Path,
    split: str | None = None,
    classes: list[str] | None = None,
    find: Finder = find_splits,
    **options: Any,
) -> Any:
    """One dataset: the requested split, else the one for evaluation, else everything."""
    source = choose_split(find(path, **options), split, path)(classes=classes)
    return source if classes is None else match_classes(source, classes)


def check_source(source: Any, role: str) -> None:
    """Raise `DataError` for an empty dataset, or for labels or masks that cannot be used."""
    if not len(source):
        raise DataError(f"the {role} set is empty.")
    if getattr(source, "unlabelled", False):
        return
    if hasattr(source, "labels"):
        check_labels(source, role)
    elif not hasattr(source, "image_ids"):
        check_masks(source, role)


def match_classes(source: Any, classes: list[str]) -> Any:
    """The source with labels that index `classes`, matched by name. Names that are indices only match by index."""
    if source.classes == classes:
        return source
    by_index = hasattr(source, "labels") and not is_multi_label(source)
    if by_index and len(source.classes) <= len(classes) and all(map(str.isdigit, source.classes)):
        source.classes = classes
        return source
    if unknown := [name for name in source.classes if name not in classes]:
        raise DataError(
            f"{len(unknown)} of {len(source.classes)} classes are unknown: {', '.join(unknown[:3])}. "
            f"Expected names among {', '.join(classes[:3])}, ... ({len(classes)} in total)."
        )
    if not hasattr(source, "labels"):
        raise DataError(
            f"expected the {len(classes)} classes {', '.join(classes[:3])}, ..., got {len(source.classes)}."
        )
    relabelled = Subset(source, np.arange(len(source)))
    relabelled.classes = classes
    if is_multi_label(source):
        relabelled.labels = np.zeros((len(source), len(classes)), dtype=bool)
        relabelled.labels[:, [classes.index(name) for name in source.classes]] = source.labels
        return relabelled
    for label, name in enumerate(source.classes):
        relabelled.labels[source.labels == label] = classes.index(name)
    return relabelled


# By task: what a path may be, and the finder of its splits
FINDERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "classification": ("a folder, Parquet or tar shards, or scenes", find_splits),
    "features": ("a folder, Parquet or tar shards, or scenes", find_unlabelled_splits),
    "video": ("a folder or CSV list of videos, or motions", find_video_splits),
    "segmentation": ("images and masks in folders, or Parquet, or scenes", find_mask_splits),
    "detection": ("COCO JSON or a folder with it, or Parquet, or scenes", find_object_splits),
}


def finder_options(find: Callable[..., Any]) -> list[str]:
    """Return the keys of `data` in a recipe that a finder of splits takes."""
    defaults = {name: parameter.default for name, parameter in signature(find).parameters.items()}
    return [name for name, value in defaults.items() if value is not Parameter.empty and name != "size"]


def check_data_options(options: dict[str, Any], supported: list[str]) -> None:
    """Raise for an unknown option of the data, naming the closest."""
    for key in options:
        if key not in supported:
            close = get_close_matches(key, supported, 1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise DataOptionError(f"unknown data option {key}.{hint} Known options: {', '.join(sorted(supported))}.")
    for key in options.keys() & {"scenes", "motions", "frames", "stride"}:
        if not isinstance(options[key], int) or options[key] < 1:
            raise DataOptionError(f"expected an integer of at least 1 for the data option {key}, got {options[key]!r}.")
