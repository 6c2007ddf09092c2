"""Sources -> batches. Which picture comes when, and every die that is thrown for it, follows from (seed, epoch) alone.

So the number of loader processes changes nothing, and a run can be continued from any step.
"""

import os
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from saccade.data.decode.image import BadImage
from saccade.data.sources.base import DataError, Source

Transform = Callable[..., Any]  # of what a sample is made of: a picture -> uint8 (3, H, W); a picture and its mask; …
Sample = Callable[[Any, Transform, int], tuple[Tensor, Any]]  # source, transform, index -> picture, its label
Key = tuple[int, int | None]  # a picture of the source, and the die of its augmentation


class Batch(NamedTuple):
    """Pictures of one step."""

    images: Tensor  # (B, 3, H, W) uint8
    labels: Tensor  # (B,) int64, or masks (B, H, W) uint8
    indices: Tensor  # (B,) int64: which pictures of the source
    bad: list[tuple[int, str]]  # (index, reason) of pictures that could not be read


class Order:
    """Which pictures form which batch, on which of `world` processes.

    `batch_size` counts the pictures of one update over all processes and accumulated parts, so the same recipe
    takes the same steps on one GPU or eight. `repeats` shows every chosen picture that often in a row, each time
    augmented anew (repeated augmentation, arXiv 1901.09335), in epochs of the same length.
    """

    def __init__(
        self,
        count: int,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        parts: int = 1,
        repeats: int = 1,
    ):
        if batch_size > count:
            raise DataError(
                f"a batch of {batch_size} needs more than the {count} pictures there are: lower batch_size."
            )
        if batch_size % (world * parts):
            raise DataError(
                f"batch_size {batch_size} counts all pictures of an update and must divide by "
                f"{world} processes x {parts} accumulated parts."
            )
        self.count, self.batch_size, self.seed = count, batch_size, seed
        self.rank, self.world, self.parts, self.repeats = rank, world, parts, repeats
        self.steps = count // batch_size  # updates an epoch; the remainder is dropped, another one each epoch

    def batches(self, epoch: int, start: int = 0) -> Iterator[list[Key]]:
        """(index, die) of this process's pictures, part by part, from update `start` of the epoch on."""
        dice = np.random.default_rng([self.seed, epoch])
        order = dice.permutation(self.count).repeat(self.repeats)[: self.count]
        throws = dice.integers(2**62, size=self.count)
        share = self.batch_size // self.parts // self.world
        for part in range(start * self.parts, self.steps * self.parts):
            first = part * share * self.world + self.rank * share
            yield list(zip(order[first : first + share].tolist(), throws[first : first + share].tolist(), strict=True))


def labelled(source: Source, transform: Transform, index: int) -> tuple[Tensor, int]:
    """A picture and the number of its class."""
    return transform(source.read(index)), int(source.labels[index])


class _Pictures(Dataset):
    """(index, die) -> picture, or the reason why not."""

    def __init__(self, source: Any, transform: Transform, sample: Sample):
        self.source, self.transform, self.sample = source, transform, sample

    def __getitem__(self, key: Key) -> tuple[Tensor, Any, int] | tuple[int, str]:
        index, die = key
        if die is not None:
            seed_all(die)  # timm and torchvision throw the dice of `random`, numpy and torch
        try:
            return *self.sample(self.source, self.transform, index), index
        except BadImage as error:
            return index, str(error)


class _Sampler:
    """What the DataLoader asks for batches; epoch and start are set before each pass."""

    def __init__(self, batches: Callable[[int, int], Iterator[list[Key]]]):
        self.batches, self.epoch, self.start = batches, 0, 0

    def __iter__(self) -> Iterator[list[Key]]:
        return self.batches(self.epoch, self.start)


class FileLoader:
    """Decodes and augments picture by picture, in `workers` processes."""

    def __init__(
        self, source: Any, transform: Transform, order: Order, workers: int | None = None, pin: bool = False,
        sample: Sample = labelled,
    ):  # fmt: skip
        self.source, self.order = source, order
        self.sampler = _Sampler(order.batches)
        pictures = _Pictures(source, transform, sample)
        self.loader = _data_loader(pictures, self.sampler, _fill_bad, workers, pin, keep=True)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        self.sampler.epoch, self.sampler.start = epoch, start
        return iter(self.loader)


class MemoryLoader:
    """Takes batches out of pictures decoded beforehand; nothing is left to do for the CPU."""

    def __init__(self, images: Tensor, labels: Tensor, order: Order, kept: np.ndarray | None = None):
        self.images, self.labels, self.order = images, labels, order
        self.kept = torch.arange(len(labels)) if kept is None else torch.as_tensor(kept)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        for keys in self.order.batches(epoch, start):
            chosen = torch.tensor([index for index, _ in keys])
            place = chosen.to(self.images.device, non_blocking=True)
            yield Batch(self.images[place], self.labels[place], self.kept[chosen], [])


class EvalLoader:
    """All pictures once, in order; process `rank` takes every `world`-th. Bad ones are left out."""

    def __init__(
        self, source: Any, transform: Transform, batch_size: int, workers: int | None = None, rank: int = 0,
        world: int = 1, pin: bool = False, sample: Sample = labelled,
    ):  # fmt: skip
        mine = list(range(rank, len(source), world))
        self.batches = [[(i, None) for i in mine[k : k + batch_size]] for k in range(0, len(mine), batch_size)]
        self.loader = _data_loader(_Pictures(source, transform, sample), self.batches, _drop_bad, workers, pin)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.loader)


class MemoryEvalLoader:
    """The same out of memory."""

    def __init__(self, memory: "Memory", batch_size: int, rank: int = 0, world: int = 1):
        self.memory, self.batch_size = memory, batch_size
        self.mine = torch.arange(rank, len(memory.labels), world)

    def __len__(self) -> int:
        return -(-len(self.mine) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for chosen in self.mine.split(self.batch_size):
            place = chosen.to(self.memory.images.device)
            kept = torch.as_tensor(self.memory.kept)[chosen]
            yield Batch(self.memory.images[place], self.memory.labels[place], kept, [])


class Memory(NamedTuple):
    """A source decoded once."""

    images: Tensor  # (N, 3, H, W) uint8
    labels: Tensor  # (N,) int64, or masks (N, H, W) uint8
    kept: np.ndarray  # (N,) which pictures of the source these are
    bad: list[tuple[int, str]]

    def to(self, device: torch.device | str) -> "Memory":
        return self._replace(images=self.images.to(device), labels=self.labels.to(device))


def decode_all(source: Any, transform: Transform, workers: int | None = None, sample: Sample = labelled) -> Memory:
    """Read every picture of a source into one tensor."""
    step = 64  # small enough for the shared memory of a container
    chunks = [[(i, None) for i in range(k, min(k + step, len(source)))] for k in range(0, len(source), step)]
    found = list(_data_loader(_Pictures(source, transform, sample), chunks, _drop_bad, workers, pin=False))
    bad = [entry for batch in found for entry in batch.bad]
    found = [batch for batch in found if len(batch.labels)]
    if not found:
        raise DataError(f"none of the {len(bad)} pictures can be read, the first: {bad[0][1]}")
    images, labels, indices = (torch.cat(parts) for parts in list(zip(*found, strict=True))[:3])
    return Memory(images, labels, indices.numpy(), bad)


def memory_size(source: Source, image_size: int, limit: int = 96, budget: int = 2 * 2**30) -> int | None:
    """The side at which a source of small pictures is worth keeping decoded, None if it is not.

    Judged by a sample: all pictures at most `limit` px a side, all together at most `budget` bytes. Square pictures
    of one size keep it; others are brought to `image_size`.
    """
    sides: set[tuple[int, int]] = set()
    for index in np.linspace(0, len(source) - 1, num=min(32, len(source)), dtype=int):
        try:
            sides.add(source.read(int(index)).size)
        except BadImage:
            continue
    if not sides or max(max(side) for side in sides) > limit:
        return None
    width, height = next(iter(sides))
    side = width if len(sides) == 1 and width == height else image_size
    return side if len(source) * 3 * side * side <= budget else None


def seed_all(seed: int) -> None:
    """Every die there is: Python's, numpy's, torch's on the CPU and, once it is in use, on the GPU.

    Not torch.manual_seed: until a GPU is in use, each call of that is queued with its stack trace, forever.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _data_loader(
    pictures: Dataset, sampler: Any, collate: Callable, workers: int | None, pin: bool, keep: bool = False
) -> DataLoader:
    workers = min(16, max(0, usable_cores() - 1)) if workers is None else workers
    return DataLoader(
        pictures,
        batch_sampler=sampler,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=pin,
        persistent_workers=keep and workers > 0,
        prefetch_factor=2 if workers else None,
        worker_init_fn=_one_thread,
    )


def _one_thread(_: int) -> None:
    torch.set_num_threads(1)


def _collate(samples: list) -> tuple[list, list[tuple[int, str]]]:
    return [s for s in samples if len(s) == 3], [s for s in samples if len(s) == 2]


def _stack(good: list, bad: list[tuple[int, str]]) -> Batch:
    images, labels = torch.stack([sample[0] for sample in good]), [sample[1] for sample in good]
    indices = torch.tensor([sample[2] for sample in good])
    return Batch(images, torch.stack(labels) if isinstance(labels[0], Tensor) else torch.tensor(labels), indices, bad)


def _fill_bad(samples: list) -> Batch:
    """For training: a bad picture's place is taken by another of its batch, so that batches keep their size."""
    good, bad = _collate(samples)
    if not good:
        raise DataError(f"all {len(bad)} pictures of a batch are unreadable, the first: {bad[0][1]}")
    return _stack([good[i % len(good)] for i in range(len(samples))], bad)


def _drop_bad(samples: list) -> Batch:
    """For evaluation and decoding: a bad picture is left out."""
    good, bad = _collate(samples)
    if not good:
        return Batch(torch.empty(0, 3, 1, 1, dtype=torch.uint8), torch.empty(0).long(), torch.empty(0).long(), bad)
    return _stack(good, bad)
