"""Pictures with objects -> batches of both, in lists: every picture keeps its size, every count of objects is right."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.data.loader import Order, _data_loader, _Pictures, _Sampler
from saccade.data.object_transforms import ObjectTransform, StraightObjects, Target
from saccade.data.objects import ObjectSource
from saccade.data.source import DataError


class ObjectBatch(NamedTuple):
    """Pictures of one step."""

    images: list[Tensor]  # (3, H, W) uint8
    labels: list[Target]  # boxes, labels, masks of every picture
    indices: Tensor  # (B,) int64: which pictures of the source
    bad: list[tuple[int, str]]  # (index, reason) of pictures that could not be read


def with_objects(source: ObjectSource, transform: ObjectTransform, index: int) -> tuple[Tensor, Target]:
    """A picture and its objects."""
    image = source.read(index)
    return transform(image, source.objects(index, image.size))


class ObjectLoader:
    """Training batches, in the order that seed and epoch give."""

    def __init__(
        self,
        source: ObjectSource,
        transform: ObjectTransform,
        order: Order,
        workers: int | None = None,
        pin: bool = False,
    ):
        self.source, self.order = source, order
        self.sampler = _Sampler(order.batches)
        pictures = _Pictures(source, transform, with_objects)
        self.loader = _data_loader(pictures, self.sampler, _fill_bad, workers, pin, keep=True)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[ObjectBatch]:
        self.sampler.epoch, self.sampler.start = epoch, start
        return iter(self.loader)


class ObjectEvalLoader:
    """All pictures once, in order; process `rank` takes every `world`-th. Bad ones are left out."""

    def __init__(
        self, source: ObjectSource, batch_size: int, workers: int | None = None, rank: int = 0, world: int = 1,
        pin: bool = False,
    ):  # fmt: skip
        mine = list(range(rank, len(source), world))
        self.batches = [[(i, None) for i in mine[k : k + batch_size]] for k in range(0, len(mine), batch_size)]
        pictures = _Pictures(source, StraightObjects(), with_objects)
        self.loader = _data_loader(pictures, self.batches, _drop_bad, workers, pin)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[ObjectBatch]:
        return iter(self.loader)


def _drop_bad(samples: list) -> ObjectBatch:
    good, bad = [s for s in samples if len(s) == 3], [s for s in samples if len(s) == 2]
    images, labels, indices = ([sample[i] for sample in good] for i in range(3))
    return ObjectBatch(images, labels, torch.tensor(indices, dtype=torch.long), bad)


def _fill_bad(samples: list) -> ObjectBatch:
    """For training: a bad picture's place is taken by another of its batch, so that batches keep their size."""
    batch = _drop_bad(samples)
    if not batch.images:
        raise DataError(f"all {len(batch.bad)} pictures of a batch are unreadable, the first: {batch.bad[0][1]}")
    places = [i % len(batch.images) for i in range(len(samples))]
    images, labels = [batch.images[i] for i in places], [batch.labels[i] for i in places]
    return ObjectBatch(images, labels, batch.indices[places], batch.bad)
