"""Data of a run: open and check the sources, read from files or from memory, count unreadable images."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
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
    UnreadableImages,
    choose_cache,
    decode_once,
    usable_cores,
)
from saccade.data.open import FINDERS, finder_options, open_train_and_val
from saccade.data.sources.base import DataError, is_multi_label
from saccade.data.synthetic.motions import MotionEvalLoader, MotionLoader, MotionSet
from saccade.data.transforms.clips import TrainClip
from saccade.data.transforms.custom import with_custom
from saccade.data.transforms.image import train_transform
from saccade.engine.clock import Clock
from saccade.engine.recipe import Augment, Recipe
from saccade.models.card import Preprocess
from saccade.tasks.predict import make_eval_transform

AnyBatch = Batch | ObjectBatch


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
    def multi_label(self) -> bool:
        return is_multi_label(self.train)

    @property
    def train_count(self) -> int:
        """Number of training images; of readable ones if they are cached."""
        return len(self.train) if self.train_memory is None else len(self.train_memory.labels)


def open_sources(recipe: Recipe, image_size: int, frames: int = 0) -> Sources:
    """Open and check the data of a task; decode small images, and masks of one size, into memory."""
    data = recipe.data
    expected, find = FINDERS["features" if recipe.distill.features else recipe.task]
    if not data.path:
        raise DataError(f"no data: give --data PATH ({expected}).")
    options = {key: getattr(data, key) for key in finder_options(find)}
    options |= {"size": image_size} | ({"frames": frames} if recipe.task == "video" else {})
    find = partial(find, **options)  # an option may have the name of a parameter of open_train_and_val
    train, val = open_train_and_val(data.path, data.val_path, data.val_fraction, recipe.seed, find, data.limit)
    unreadable = UnreadableImages(data.max_unreadable)
    decode = None
    if not recipe.augment.custom and recipe.task in ("classification", "segmentation"):  # custom: on single images
        decode = choose_cache(data.cache, train, val, image_size, data.interpolation, data.workers)
    if decode is None:
        return Sources(train, val, None, None, unreadable)
    if data.cache_folder:
        changed = Path(data.path).stat().st_mtime_ns if Path(data.path).exists() else None
        key = (data.path, changed, image_size, data.interpolation)
        decode = partial(decode_once, decode=decode, folder=data.cache_folder, key=key)
    train_memory, val_memory = decode(train), decode(val)
    unreadable.add(train_memory.bad, "training")
    unreadable.add(val_memory.bad, "validation")
    return Sources(train, val, train_memory, val_memory, unreadable)


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


def augment_options(augment: Augment) -> dict[str, Any]:
    """Return the options shared by `train_transform` (single images) and `BatchAugment` (batches on the device)."""
    return {name: getattr(augment, name) for name in ("crop", "pad", "scale", "ratio", "flip")}
