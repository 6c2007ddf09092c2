"""Data of a run: open and check the sources, read from files or from memory, count unreadable images."""

import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from saccade.data.loader import (
    Batch,
    EvalLoader,
    FileLoader,
    LoadSample,
    Memory,
    MemoryEvalLoader,
    MemoryLoader,
    ObjectBatch,
    ObjectEvalLoader,
    ObjectLoader,
    Order,
    cached_image_size,
    decode_all,
    load_labelled,
    usable_cores,
)
from saccade.data.open import find_video_splits, open_train_and_val
from saccade.data.sources.base import DataError, Source
from saccade.data.synthetic.motions import MotionEvalLoader, MotionLoader, MotionSet
from saccade.data.transforms.batch import BatchAugment, Policy
from saccade.data.transforms.clips import EvalClip, TrainClip
from saccade.data.transforms.image import MemoryTransform, eval_transform, train_transform
from saccade.engine.clock import Clock
from saccade.engine.recipe import Augment, Data, Recipe
from saccade.models.card import Preprocess

AnyBatch = Batch | ObjectBatch
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


def check_path(data: Data, expected: str) -> str:
    """Return data.path, or raise an error that says what it may be."""
    if not data.path:
        raise DataError(f"no data: give --data PATH ({expected}).")
    return data.path


def open_sources(data: Data, image_size: int, seed: int, frames: int = 0) -> Sources:
    """Open and check labelled images, or with `frames` labelled videos; decode small images into memory."""
    options: dict[str, Any]
    if frames:
        path = check_path(data, "a folder or CSV list of videos, or motions")
        options = {"find": find_video_splits, "motions": data.motions, "frames": frames}
    else:
        path = check_path(data, "a folder, Parquet or tar shards, or scenes")
        options = {"image_column": data.image_column, "label_column": data.label_column, "scenes": data.scenes}
    train, val = open_train_and_val(path, data.val_path, data.val_fraction, seed, size=image_size, **options)
    unreadable = UnreadableImages(data.max_unreadable)
    side = None
    if data.cache is True and not frames:
        side = cached_image_size(train, image_size, max_side=image_size, max_bytes=2**40) or image_size
    elif data.cache == "auto" and not frames:
        side = cached_image_size(train, image_size)
    if side is None:
        return Sources(train, val, None, None, unreadable)
    return decode_sources(train, val, MemoryTransform(side, data.interpolation), unreadable, data.workers)


def decode_sources(
    train: Any,
    val: Any,
    transform: Callable[..., Any],
    unreadable: UnreadableImages,
    workers: int | None,
    load: LoadSample = load_labelled,
) -> Sources:
    """Decode both sources into memory."""
    train_memory = decode_all(train, transform, workers, load)
    unreadable.add(train_memory.bad, "training")
    val_memory = decode_all(val, transform, workers, load)
    unreadable.add(val_memory.bad, "validation")
    return Sources(train, val, train_memory, val_memory, unreadable)


class Loaders(NamedTuple):
    """The loaders of one process."""

    order: Order
    train: FileLoader | MemoryLoader | MotionLoader | ObjectLoader
    val: EvalLoader | MemoryEvalLoader | MotionEvalLoader | ObjectEvalLoader

    def stream(self, clock: Clock, val_every: int) -> "BatchStream":
        return BatchStream(self, clock, val_every)


class Partition(NamedTuple):
    """The part of a run that one process executes."""

    order: Order
    images: int  # per micro-batch
    workers: int
    device: torch.device

    @classmethod
    def of(
        cls, recipe: Recipe, sources: Sources, device: torch.device, rank: int, world: int, local_world: int
    ) -> "Partition":
        """Return the partition of process `rank` of `world`; `local_world` processes run on this machine."""
        data, accumulate = recipe.data, recipe.trainer.accumulate
        order = Order(
            sources.train_count, recipe.batch_size, recipe.seed, rank, world, accumulate, recipe.augment.repeats
        )
        workers = data.workers if data.workers is not None else min(16, max(0, usable_cores() // local_world - 1))
        return cls(order, recipe.batch_size // accumulate // world, workers, device)

    @property
    def pin(self) -> bool:
        return self.device.type == "cuda"


def memory_loaders(sources: Sources, partition: Partition) -> Loaders | None:
    """Return loaders of images cached on the device, or None if the sources are not cached."""
    train, val, order = sources.train_memory, sources.val_memory, partition.order
    if train is None or val is None:
        return None
    train, val = train.to(partition.device), val.to(partition.device)
    return Loaders(
        order,
        MemoryLoader(train, order),
        MemoryEvalLoader(val, partition.images, order.rank, order.world_size),
    )


def image_loaders(recipe: Recipe, sources: Sources, preprocess: Preprocess, partition: Partition) -> Loaders:
    """Return loaders of labelled images or clips."""
    data, order = recipe.data, partition.order
    cached = memory_loaders(sources, partition)
    if cached is not None:
        return cached
    if isinstance(sources.train, MotionSet) and isinstance(sources.val, MotionSet):
        val = MotionEvalLoader(sources.val.to(partition.device), partition.images, order.rank, order.world_size)
        return Loaders(order, MotionLoader(sources.train.to(partition.device), order), val)
    transform: Callable[..., Any] = image_augment(recipe.augment, data, preprocess)
    if preprocess.frames:
        transform = TrainClip(preprocess.frames, preprocess.stride, transform)
    val_transform = make_eval_transform(preprocess._replace(size=data.val_size or preprocess.size))
    workers, pin = partition.workers, partition.pin
    return Loaders(
        order,
        FileLoader(sources.train, transform, order, workers, pin),
        EvalLoader(sources.val, val_transform, partition.images, workers, order.rank, order.world_size, pin),
    )


class BatchStream:
    """Iterable for Lightning: each pass yields the batches from the current step to the next validation."""

    def __init__(self, loaders: Loaders, clock: Clock, val_every: int):
        self.loaders, self.clock, self.val_every = loaders, clock, val_every

    def __iter__(self) -> Iterator[AnyBatch]:
        order, clock = self.loaders.order, self.clock
        step = clock.steps
        interval = order.steps * self.val_every
        end = min((step // interval + 1) * interval, clock.total_steps)
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


def make_eval_transform(preprocess: Preprocess, views: tuple[int, int] = (1, 1)) -> Callable[..., Any]:
    """Return the evaluation transform of an image, or of a video with `views` temporal clips and spatial crops."""
    if not preprocess.frames:
        return eval_transform(preprocess.size, preprocess.crop_pct, preprocess.interpolation)
    size, frames, stride = preprocess.size, preprocess.frames, preprocess.stride
    return EvalClip(size, frames, stride, preprocess.crop_pct, preprocess.interpolation, *views)


def batch_augment(augment: Augment, size: int, preprocess: Preprocess) -> BatchAugment:
    """Return the augmentation of batches that are cached on the device."""
    policy = Policy.parse(augment.auto_augment)
    return BatchAugment(
        size,
        preprocess.mean,
        preprocess.std,
        crop=augment.crop,
        pad=augment.pad,
        scale=augment.scale,
        ratio=augment.ratio,
        flip=augment.flip,
        jitter=0.0 if policy else augment.jitter,
        policy=policy,
    )


def image_augment(augment: Augment, data: Data, preprocess: Preprocess) -> Callable[..., Any]:
    """Return the augmentation of single images in the loader processes."""
    return train_transform(
        preprocess.size,
        crop=augment.crop,
        pad=augment.pad,
        scale=augment.scale,
        ratio=augment.ratio,
        flip=augment.flip,
        jitter=augment.jitter,
        auto_augment=augment.auto_augment,
        interpolation=data.interpolation,
        mean=preprocess.mean,
    )
