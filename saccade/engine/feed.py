"""From a recipe's data to batches: opens and checks the sources, decides files or memory, counts bad pictures."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from saccade.data.loader import (
    Batch,
    EvalLoader,
    FileLoader,
    Memory,
    MemoryEvalLoader,
    MemoryLoader,
    Order,
    cached_image_size,
    decode_all,
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

_logger = logging.getLogger(__name__)


class BadPictures:
    """Unreadable pictures: told once each, counted, and too many of them stop the run."""

    def __init__(self, most: int):
        self.most = most
        self.found: dict[str, str] = {}

    def add(self, bad: list[tuple[int, str]], role: str = "training") -> None:
        for index, reason in bad:
            key = f"{role} {index}"
            if key not in self.found:
                self.found[key] = reason
                _logger.warning("skipped an unreadable picture: %s", reason)
        if len(self.found) > self.most:
            examples = "; ".join(list(self.found.values())[:3])
            raise DataError(
                f"{len(self.found)} pictures cannot be read, more than data.max_bad={self.most} allows: {examples}. "
                "Mend or remove them, or raise data.max_bad."
            )


class Sources(NamedTuple):
    """What a run trains on, opened and checked."""

    train: Any  # a `Source`, or what takes its place in other tasks
    val: Any
    train_memory: Memory | None  # decoded once, when the pictures are small
    val_memory: Memory | None
    bad: BadPictures

    @property
    def classes(self) -> list[str]:
        return self.train.classes


def open_sources(data: Data, image_size: int, seed: int, frames: int = 0) -> Sources:
    """Open and check both sets, and decode them now if that pays. With `frames`, they are sets of videos."""
    if frames:
        if not data.path:
            raise DataError("no data: give --data PATH (a folder or CSV list of videos) or --data motions.")
        train, val = open_train_and_val(
            data.path,
            data.val_path,
            data.val_fraction,
            seed,
            find_video_splits,
            motions=data.motions,
            size=image_size,
            frames=frames,
        )
        return Sources(train, val, None, None, BadPictures(data.max_bad))
    if not data.path:
        raise DataError("no data: give --data PATH (a folder, Parquet, tar shards) or --data scenes.")
    train, val = open_train_and_val(
        data.path,
        data.val_path,
        data.val_fraction,
        seed,
        image_column=data.image_column,
        label_column=data.label_column,
        scenes=data.scenes,
        size=image_size,
    )
    bad = BadPictures(data.max_bad)
    side = None
    if data.cache is True:
        side = cached_image_size(train, image_size, max_side=image_size, max_bytes=2**40) or image_size
    elif data.cache == "auto":
        side = cached_image_size(train, image_size)
    if side is None:
        return Sources(train, val, None, None, bad)
    memories = []
    for role, source in (("training", train), ("validation", val)):
        memory = decode_all(source, MemoryTransform(side, data.interpolation), data.workers)
        bad.add(memory.bad, role)
        memories.append(memory)
    return Sources(train, val, memories[0], memories[1], bad)


class Feed(NamedTuple):
    """The loaders of one process."""

    order: Order
    train: FileLoader | MemoryLoader | MotionLoader
    val: EvalLoader | MemoryEvalLoader | MotionEvalLoader

    def stream(self, clock: Clock, val_every: int) -> "Stream":
        return Stream(self, clock, val_every)


class Share(NamedTuple):
    """One process's part in a run."""

    order: Order
    pictures: int  # of each part of a batch
    workers: int
    device: torch.device

    @classmethod
    def of(cls, recipe: Recipe, sources: Sources, device: torch.device, rank: int, world: int, here: int) -> "Share":
        """Process `rank` of `world`; `here` of them share this machine's cores."""
        data, parts, memory = recipe.data, recipe.trainer.accumulate, sources.train_memory
        count = len(sources.train) if memory is None else len(memory.labels)
        order = Order(count, recipe.batch_size, recipe.seed, rank, world, parts, recipe.augment.repeats)
        workers = data.workers if data.workers is not None else min(16, max(0, usable_cores() // here - 1))
        return cls(order, recipe.batch_size // parts // world, workers, device)

    @property
    def pin(self) -> bool:
        return self.device.type == "cuda"


def memory_feed(sources: Sources, share: Share) -> Feed | None:
    """Batches out of decoded pictures, kept on the device; None if they were not decoded."""
    memory, held, order = sources.train_memory, sources.val_memory, share.order
    if memory is None or held is None:
        return None
    memory, held = memory.to(share.device), held.to(share.device)
    train = MemoryLoader(memory, order)
    return Feed(order, train, MemoryEvalLoader(held, share.pictures, order.rank, order.world_size))


def picture_feed(recipe: Recipe, sources: Sources, sizes: Preprocess, share: Share) -> Feed:
    """For classification, of pictures or clips."""
    data, order = recipe.data, share.order
    kept = memory_feed(sources, share)
    if kept is not None:
        return kept
    if isinstance(sources.train, MotionSet) and isinstance(sources.val, MotionSet):
        val = MotionEvalLoader(sources.val.to(share.device), share.pictures, order.rank, order.world_size)
        return Feed(order, MotionLoader(sources.train.to(share.device), order), val)
    change = train_transform(**_single(recipe.augment, data, sizes))
    if sizes.frames:
        change = TrainClip(sizes.frames, sizes.stride, change)
    straight = straight_transform(sizes._replace(size=data.val_size or sizes.size))
    return Feed(
        order,
        FileLoader(sources.train, change, order, share.workers, share.pin),
        EvalLoader(sources.val, straight, share.pictures, share.workers, order.rank, order.world_size, share.pin),
    )


class Stream:
    """What Lightning iterates: each pass gives the batches from where the run stands to the next validation."""

    def __init__(self, feed: Feed, clock: Clock, val_every: int):
        self.feed, self.clock, self.val_every = feed, clock, val_every

    def __iter__(self) -> Iterator[Batch]:
        order, clock = self.feed.order, self.clock
        step = clock.steps
        stretch = order.steps * self.val_every
        end = min((step // stretch + 1) * stretch, clock.total)
        while step < end and not clock.expired():
            epoch, start = divmod(step, order.steps)
            for number, batch in enumerate(self.feed.train.epoch(epoch, start), 1):
                yield batch
                if number % order.accumulate == 0:
                    step += 1
                    if step >= end or clock.expired():
                        break


def evaluation_batches(
    source: Source,
    sizes: Preprocess,
    batch_size: int,
    workers: int | None,
    device: torch.device | str,
    views: tuple[int, int] = (1, 1),
) -> EvalLoader | MotionEvalLoader:
    """All of a source, once, as an evaluation on one process wants it."""
    if isinstance(source, MotionSet):
        return MotionEvalLoader(source.to(device), batch_size)
    pin = torch.device(device).type == "cuda"
    return EvalLoader(source, straight_transform(sizes, views), batch_size, workers, pin_memory=pin)


def straight_transform(sizes: Preprocess, views: tuple[int, int] = (1, 1)) -> Callable:
    """How evaluation sees a picture, or a video in `views` clips and crops."""
    if not sizes.frames:
        return eval_transform(sizes.size, sizes.crop_pct, sizes.interpolation)
    return EvalClip(sizes.size, sizes.frames, sizes.stride, sizes.crop_pct, sizes.interpolation, *views)


def batch_augment(augment: Augment, size: int, sizes: Preprocess) -> BatchAugment:
    """For pictures in memory."""
    policy = Policy.parse(augment.auto)
    return BatchAugment(
        size,
        sizes.mean,
        sizes.std,
        crop=augment.crop,
        pad=augment.pad,
        scale=augment.scale,
        ratio=augment.ratio,
        flip=augment.flip,
        jitter=0.0 if policy else augment.jitter,
        policy=policy,
    )


def _single(augment: Augment, data: Data, sizes: Preprocess) -> dict:
    """For pictures read one by one."""
    names = ("crop", "pad", "scale", "ratio", "flip", "jitter")
    chosen = {name: value for name, value in asdict(augment).items() if name in names}
    chosen["auto_augment"] = augment.auto
    return chosen | {"size": sizes.size, "interpolation": data.interpolation, "mean": sizes.mean}
