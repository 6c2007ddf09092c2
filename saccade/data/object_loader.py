"""Pictures with objects -> batches of both, in lists: every picture keeps its size, every count of objects is right.

Masks travel from the loader's processes to the device eight pixels a byte: a batch of crowded pictures is hundreds of
megabytes otherwise.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from saccade.data.loader import Order, _data_loader, _Pictures, _Sampler
from saccade.data.sources.base import DataError
from saccade.data.sources.objects import ObjectSource
from saccade.data.transforms.objects import ObjectTransform, StraightObjects, Target


class ObjectBatch(NamedTuple):
    """Pictures of one step."""

    images: list[Tensor]  # (3, H, W) uint8
    labels: list[Target]  # boxes and labels of every picture; in training also masks, packed
    indices: Tensor  # (B,) int64: which pictures of the source
    bad: list[tuple[int, str]]  # (index, reason) of pictures that could not be read


def with_objects(source: ObjectSource, transform: ObjectTransform, index: int) -> tuple[Tensor, Target]:
    """A picture and its objects."""
    image = source.read(index)
    return transform(image, source.objects(index, image.size))


def pack_masks(masks: Tensor) -> Tensor:
    """masks (n, H, W) of 0 and 1 -> (n, H, W / 8, rounded up) uint8."""
    return torch.from_numpy(np.packbits(masks.numpy(), axis=-1))


def unpack_masks(packed: Tensor, width: int) -> Tensor:
    """What `pack_masks` was given, on whatever device."""
    bits = 7 - torch.arange(8, dtype=torch.uint8, device=packed.device)  # the first pixel is the highest bit
    return (packed.unsqueeze(-1) >> bits & 1).flatten(-2)[..., :width]


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
    """All pictures once, in order; process `rank` takes every `world`-th. Bad ones are left out, masks too: the metric
    has its own.
    """

    def __init__(
        self, source: ObjectSource, batch_size: int, workers: int | None = None, rank: int = 0, world: int = 1,
        pin: bool = False,
    ):  # fmt: skip
        mine = list(range(rank, len(source), world))
        self.batches = [[(i, None) for i in mine[k : k + batch_size]] for k in range(0, len(mine), batch_size)]
        pictures = _Pictures(source, StraightObjects(), with_objects)
        self.loader = _data_loader(pictures, self.batches, _without_masks, workers, pin)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[ObjectBatch]:
        return iter(self.loader)


def _drop_bad(samples: list) -> ObjectBatch:
    good, bad = [s for s in samples if len(s) == 3], [s for s in samples if len(s) == 2]
    images, labels, indices = ([sample[i] for sample in good] for i in range(3))
    return ObjectBatch(images, labels, torch.tensor(indices, dtype=torch.long), bad)


def _without_masks(samples: list) -> ObjectBatch:
    batch = _drop_bad(samples)
    return batch._replace(labels=[{key: label[key] for key in ("boxes", "labels")} for label in batch.labels])


def _fill_bad(samples: list) -> ObjectBatch:
    """For training: a bad picture's place is taken by another of its batch, so that batches keep their size."""
    batch = _drop_bad(samples)
    if not batch.images:
        raise DataError(f"all {len(batch.bad)} pictures of a batch are unreadable, the first: {batch.bad[0][1]}")
    for label in batch.labels:
        if "masks" in label:
            label["masks"] = pack_masks(label["masks"])
    places = [i % len(batch.images) for i in range(len(samples))]
    images, labels = [batch.images[i] for i in places], [batch.labels[i] for i in places]
    return ObjectBatch(images, labels, batch.indices[places], batch.bad)
