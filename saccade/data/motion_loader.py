"""Batches of the embedded motions, rendered where they are used; training never sees a clip twice."""

from collections.abc import Iterator

import torch
from torch import Tensor

from saccade.data.loader import Batch, Order
from saccade.data.synthetic.motions import MotionSet


class MotionLoader:
    """Clips drawn anew for every update; each follows from (seed, epoch, its place) alone."""

    def __init__(self, source: MotionSet, order: Order):
        self.source, self.order = source, order

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        for keys in self.order.batches(epoch, start):
            indices, dice = zip(*keys, strict=True)
            yield _batch(self.source, list(indices), list(dice))


class MotionEvalLoader:
    """All clips of the set once, in order; process `rank` takes every `world`-th."""

    def __init__(self, source: MotionSet, batch_size: int, rank: int = 0, world: int = 1):
        self.source = source
        mine = list(range(rank, len(source), world))
        self.batches = [mine[k : k + batch_size] for k in range(0, len(mine), batch_size)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        for indices in self.batches:
            yield _batch(self.source, indices, None)


def _batch(source: MotionSet, indices: list[int], dice: list[int] | None) -> Batch:
    chosen = torch.tensor(indices)
    labels = torch.from_numpy(source.labels)[chosen].to(source.photos.device)
    return Batch(one_frame_is_a_picture(source.clips(indices, dice)), labels, chosen, [])


def one_frame_is_a_picture(clips: Tensor) -> Tensor:
    """clips (…, T, H, W); without the axis of time where it is 1, so that image models see single frames."""
    return clips.squeeze(-3) if clips.shape[-3] == 1 else clips
