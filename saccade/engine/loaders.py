"""Data of a run: open and check the sources, read from files or from memory, count unreadable images."""

import importlib
import logging
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from saccade.data.loader import (
    Batch,
    EvalLoader,
    FileLoader,
    Memory,
    MemoryEvalLoader,
    MemoryLoader,
    ObjectBatch,
    ObjectEvalLoader,
    ObjectLoader,
    Order,
    cached_image_size,
    decode_all,
    sampled_sizes,
    usable_cores,
)
from saccade.data.open import (
    find_mask_splits,
    find_object_splits,
    find_splits,
    find_unlabelled_splits,
    find_video_splits,
    open_train_and_val,
)
from saccade.data.sources.base import DataError, Source
from saccade.data.sources.masks import MaskSource, load_pair
from saccade.data.synthetic.motions import MotionEvalLoader, MotionLoader, MotionSet
from saccade.data.transforms.clips import TrainClip
from saccade.data.transforms.image import MemoryTransform, train_transform
from saccade.data.transforms.mask import EvalPair
from saccade.engine.clock import Clock
from saccade.engine.recipe import Augment, Data, Recipe, RecipeError
from saccade.models.card import Preprocess
from saccade.tasks.predict import make_eval_transform

AnyBatch = Batch | ObjectBatch
MASK_CACHE_BYTES = 4 * 2**30  # decoded images and masks up to this size are cached on the device
_logger = logging.getLogger(__name__)


class UnreadableImages:
    """Count unreadable images, log each once, and raise `DataError` when there are more than `limit`."""

    def __init__(self, limit: int):
        self.limit = limit
        self.reasons: dict[str, str] = {}  # by split and index

    def __len__(self) -> int:
        return len(self.reasons)

    def add(self, bad: list[tuple[int, str]], split: str = "training") -> None:
        for index, reason in bad:
            key = f"{split} {index}"
            if key not in self.reasons:
                self.reasons[key] = reason
                _logger.warning("skipped an unreadable image: %s", reason)
        if len(self) > self.limit:
            examples = "; ".join(list(self.reasons.values())[:3])
            raise DataError(
                f"{len(self)} images cannot be read, more than data.max_unreadable={self.limit} allows: {examples}. "
                "Repair or remove them, or raise data.max_unreadable."
            )


class Sources(NamedTuple):
    """Training and validation data, opened and checked."""

    train: Any  # Source, MaskSource or ObjectSource
    val: Any
    train_memory: Memory | None  # decoded images, if they are cached
    val_memory: Memory | None
    unreadable: UnreadableImages

    @property
    def classes(self) -> list[str]:
        return self.train.classes

    @property
    def train_count(self) -> int:
        """Number of training images; of readable ones if they are cached."""
        return len(self.train) if self.train_memory is None else len(self.train_memory.labels)


# By task: what a path may be, the finder of its splits, and the keys of `data` that matter to it.
_COLUMNS = ("image_column", "label_column", "scenes")
_MASK_KEYS = ("layout", "classes", "ignore_index", "reduce_zero_label", "mask_values", "image_column", "mask_column")
_FINDERS: dict[str, tuple[str, Callable[..., Any], tuple[str, ...]]] = {
    "classification": ("a folder, Parquet or tar shards, or scenes", find_splits, _COLUMNS),
    "features": ("a folder, Parquet or tar shards, or scenes", find_unlabelled_splits, ("image_column", "scenes")),
    "video": ("a folder or CSV list of videos, or motions", find_video_splits, ("motions",)),
    "segmentation": (
        "images and masks in folders, or Parquet, or scenes", find_mask_splits, (*_MASK_KEYS, "scenes")
    ),
    "detection": (
        "COCO JSON or a folder with it, or Parquet, or scenes", find_object_splits, ("image_column", "scenes")
    ),
}  # fmt: skip


def open_sources(recipe: Recipe, image_size: int, frames: int = 0) -> Sources:
    """Open and check the data of a task; decode small images, and masks of one size, into memory."""
    data = recipe.data
    expected, find, keys = _FINDERS["features" if recipe.distill.features else recipe.task]
    if not data.path:
        raise DataError(f"no data: give --data PATH ({expected}).")
    options = {key: getattr(data, key) for key in keys} | ({"frames": frames} if recipe.task == "video" else {})
    common = (data.path, data.val_path, data.val_fraction, recipe.seed, find, data.limit)
    train, val = open_train_and_val(*common, size=image_size, **options)
    unreadable = UnreadableImages(data.max_unreadable)
    cache = {"classification": _image_cache, "segmentation": _mask_cache}.get(recipe.task)
    if data.cache is False or recipe.augment.custom or cache is None:  # custom augmentations work on single images
        return Sources(train, val, None, None, unreadable)
    decode = cache(data, train, val, image_size)
    if decode is None:
        return Sources(train, val, None, None, unreadable)
    train_memory = decode(train)
    unreadable.add(train_memory.bad, "training")
    val_memory = decode(val)
    unreadable.add(val_memory.bad, "validation")
    return Sources(train, val, train_memory, val_memory, unreadable)


def _image_cache(data: Data, train: Source, val: Source, size: int) -> Callable[[Any], Memory] | None:
    """Return the function that decodes a source into memory, or None if it is too large."""
    if data.cache is True:
        side = cached_image_size(train, size, max_side=size, max_bytes=2**40) or size
    else:
        side = cached_image_size(train, size)
    return side and partial(decode_all, transform=MemoryTransform(side, data.interpolation), workers=data.workers)


def _mask_cache(data: Data, train: MaskSource, val: MaskSource, size: int) -> Callable[[Any], Memory] | None:
    """The same for images with masks, which must have one size: judged by a sample of 32."""
    num_bytes = 0
    for source in (train, val):
        sizes = sampled_sizes(source)
        if len(sizes) != 1:
            if data.cache is True:
                raise DataError("data.cache=true needs images of one size, got several. Set data.cache=false.")
            return None
        num_bytes += len(source) * 4 * math.prod(sizes.pop())
    if data.cache == "auto" and num_bytes > MASK_CACHE_BYTES:
        return None
    return partial(decode_all, transform=EvalPair(), workers=data.workers, load=load_pair)


class Loaders(NamedTuple):
    """The loaders of one process."""

    order: Order
    train: FileLoader | MemoryLoader | MotionLoader | ObjectLoader
    val: EvalLoader | MemoryEvalLoader | MotionEvalLoader | ObjectEvalLoader


class Partition(NamedTuple):
    """The part of a run that one process executes."""

    order: Order
    images: int  # per micro-batch
    workers: int
    device: torch.device
    views: tuple[int, int] = (1, 1)  # of a validation video: temporal clips, spatial crops

    @classmethod
    def of(
        cls, recipe: Recipe, sources: Sources, device: torch.device, rank: int = 0, world: int = 1, nodes: int = 1
    ) -> "Partition":
        """Return the partition of process `rank` of `world` processes on `nodes` machines."""
        data, accumulate = recipe.data, recipe.trainer.accumulate
        order = Order(
            sources.train_count, recipe.batch_size, recipe.seed, rank, world, accumulate, recipe.augment.repeats
        )
        workers = data.workers
        if workers is None:
            workers = min(16, max(0, usable_cores() // max(1, world // nodes) - 1))
        return cls(order, recipe.batch_size // accumulate // world, workers, device)

    @property
    def pin(self) -> bool:
        return self.device.type == "cuda"


def memory_loaders(sources: Sources, partition: Partition) -> Loaders | None:
    """Return loaders of images cached on the device, or None if the sources are not cached."""
    if sources.train_memory is None or sources.val_memory is None:
        return None
    order, device = partition.order, partition.device
    val = MemoryEvalLoader(sources.val_memory.to(device), partition.images, order.rank, order.world_size)
    return Loaders(order, MemoryLoader(sources.train_memory.to(device), order), val)


def image_loaders(recipe: Recipe, sources: Sources, preprocess: Preprocess, partition: Partition) -> Loaders:
    """Return loaders of labelled images or clips."""
    data, order = recipe.data, partition.order
    cached = memory_loaders(sources, partition)
    if cached is not None:
        return cached
    if isinstance(sources.train, MotionSet) and isinstance(sources.val, MotionSet):
        val = MotionEvalLoader(sources.val.to(partition.device), partition.images, order.rank, order.world_size)
        return Loaders(order, MotionLoader(sources.train.to(partition.device), order), val)
    transform: Callable[..., Any] = train_transform(
        preprocess.size,
        **augment_options(recipe.augment),
        jitter=recipe.augment.jitter,
        auto_augment=recipe.augment.auto_augment,
        interpolation=data.interpolation,
        mean=preprocess.mean,
    )
    transform = with_custom(recipe.augment.custom, transform)
    if preprocess.frames:
        transform = TrainClip(preprocess.frames, preprocess.stride, transform)
    val_transform = make_eval_transform(preprocess._replace(size=data.val_size or preprocess.size), partition.views)
    workers, pin = partition.workers, partition.pin
    return Loaders(
        order,
        FileLoader(sources.train, transform, order, workers, pin),
        EvalLoader(sources.val, val_transform, partition.images, workers, order.rank, order.world_size, pin),
    )


class BatchStream:
    """Iterable for Lightning: each pass yields the batches from the current step to the next validation."""

    def __init__(self, loaders: Loaders, clock: Clock, val_every: int):
        self.loaders, self.clock, self.interval = loaders, clock, loaders.order.steps * val_every

    def steps_left(self) -> int:
        """Return the number of optimizer steps until the next validation."""
        step = self.clock.steps
        return min((step // self.interval + 1) * self.interval, self.clock.total_steps) - step

    def __iter__(self) -> Iterator[AnyBatch]:
        order, clock = self.loaders.order, self.clock
        step = clock.steps
        end = step + self.steps_left()
        while step < end and not clock.expired():
            epoch, start = divmod(step, order.steps)
            for number, batch in enumerate(self.loaders.train.epoch(epoch, start), 1):
                yield batch
                if number % order.accumulate == 0:
                    step += 1
                    if step >= end or clock.expired():
                        break


def evaluation_loader(
    source: Source,
    preprocess: Preprocess,
    batch_size: int,
    workers: int | None,
    device: torch.device | str,
    views: tuple[int, int] = (1, 1),
) -> EvalLoader | MotionEvalLoader:
    """Return a loader of the complete source for evaluation on one process."""
    if isinstance(source, MotionSet):
        return MotionEvalLoader(source.to(device), batch_size)
    pin = torch.device(device).type == "cuda"
    return EvalLoader(source, make_eval_transform(preprocess, views), batch_size, workers, pin_memory=pin)


class CustomFirst:
    """A transform that is preceded by a user's function of its arguments: image, or image and mask or objects."""

    def __init__(self, function: Callable[..., Any], transform: Callable[..., Any]):
        self.function, self.transform = function, transform

    def __call__(self, *sample: Any) -> Any:
        changed = self.function(*sample)
        return self.transform(*(changed if len(sample) > 1 else (changed,)))


def with_custom(name: str, transform: Callable[..., Any]) -> Callable[..., Any]:
    """Return `transform`, preceded by the function `name` ("package.function", also from the current folder)."""
    if not name:
        return transform
    module, _, function = name.rpartition(".")
    sys.path.insert(0, "")
    try:
        return CustomFirst(getattr(importlib.import_module(module), function), transform)
    except (ImportError, AttributeError, ValueError) as error:
        raise RecipeError(f"augment.custom: expected package.function, got {name!r} ({error}).") from error
    finally:
        sys.path.remove("")


def augment_options(augment: Augment) -> dict[str, Any]:
    """Return the options shared by `train_transform` (single images) and `BatchAugment` (batches on the device)."""
    return {name: getattr(augment, name) for name in ("crop", "pad", "scale", "ratio", "flip")}
