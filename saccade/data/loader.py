"""Sources -> batches. The order of samples and the seed of every augmentation depend on (seed, epoch) only.

The number of workers therefore changes nothing, and a run can resume at any step.
"""

import hashlib
import json
import logging
import math
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from saccade._files import locked, replaced_file
from saccade.data.decode.image import BadImage
from saccade.data.sources.base import DataError, Source
from saccade.data.sources.masks import load_pair
from saccade.data.sources.objects import ObjectSource, load_objects
from saccade.data.transforms.image import MemoryTransform
from saccade.data.transforms.mask import EvalPair
from saccade.data.transforms.objects import EvalObjects, Target, pack_masks

Transform = Callable[..., Any]  # image -> uint8 (3, H, W); or image and mask -> both; or image and objects -> both
LoadSample = Callable[[Any, Transform, int], tuple[Tensor, Any]]  # source, transform, index -> image, label
Key = tuple[int, int | None]  # index of a sample, and the seed of its augmentation
Bad = list[tuple[int, str]]  # (index, reason) of samples that cannot be read

_logger = logging.getLogger(__name__)
MASK_CACHE_BYTES = 4 * 2**30  # decoded images and masks up to this size are cached


class Batch(NamedTuple):
    """Images and labels of one step."""

    images: Tensor  # (B, 3, H, W) uint8
    labels: Tensor  # (B,) int64; multi-label: (B, K) float32, 0 or 1; or masks (B, H, W) uint8
    indices: Tensor  # (B,) int64, in the source
    bad: Bad


class ObjectBatch(NamedTuple):
    """Images and objects of one step; images keep their sizes."""

    images: list[Tensor]  # (3, H, W) uint8
    labels: list[Target]  # boxes and labels; in training also masks, see `pack_masks`
    indices: Tensor  # (B,) int64, in the source
    bad: Bad


AnyBatch = TypeVar("AnyBatch", Batch, ObjectBatch)


class Order:
    """Which samples form which batch, on which process.

    `batch_size` is the number of samples per optimizer step, over all processes and `accumulate` accumulation steps, so
    a recipe takes the same steps on one GPU or eight. With `repeats`, each sample occurs that often in a row with
    different seeds (repeated augmentation, arXiv 1901.09335); the epoch keeps its length.
    """

    def __init__(
        self,
        count: int,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        accumulate: int = 1,
        repeats: int = 1,
    ):
        if batch_size > count:
            raise DataError(f"batch_size ({batch_size}) must not exceed the number of images ({count}).")
        if batch_size % (world_size * accumulate):
            raise DataError(
                f"batch_size ({batch_size}) must be divisible by {world_size} processes x "
                f"{accumulate} accumulation steps."
            )
        self.count, self.batch_size, self.seed = count, batch_size, seed
        self.rank, self.world_size, self.accumulate, self.repeats = rank, world_size, accumulate, repeats
        self.steps = count // batch_size  # optimizer steps per epoch; the remainder, different each epoch, is dropped

    def batches(self, epoch: int, start: int = 0) -> Iterator[list[Key]]:
        """(index, seed) of the batches of this process, from optimizer step `start` of the epoch."""
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(self.count).repeat(self.repeats)[: self.count]
        seeds = rng.integers(2**62, size=self.count)
        size = self.batch_size // self.accumulate // self.world_size
        for number in range(start * self.accumulate, self.steps * self.accumulate):
            first = (number * self.world_size + self.rank) * size
            yield list(zip(order[first : first + size].tolist(), seeds[first : first + size].tolist(), strict=True))


def eval_batches(count: int, batch_size: int, rank: int = 0, world_size: int = 1) -> list[list[Key]]:
    """Every index once, in order; process `rank` gets every `world_size`-th."""
    indices = range(rank, count, world_size)
    return [[(i, None) for i in indices[k : k + batch_size]] for k in range(0, len(indices), batch_size)]


def load_labelled(source: Source, transform: Transform, index: int) -> tuple[Tensor, int | Tensor]:
    """Transformed image and class index, or multi-hot classes (K,), as a sample."""
    label = source.labels[index]
    return transform(source.read(index)), torch.from_numpy(label).float() if label.ndim else int(label)


class _Samples(Dataset):
    """(index, seed) -> sample, or the reason why it cannot be read."""

    def __init__(self, source: Any, transform: Transform, load: LoadSample):
        self.source, self.transform, self.load = source, transform, load

    def __getitem__(self, key: Key) -> tuple[Tensor, Any, int] | tuple[int, str]:
        index, seed = key
        if seed is not None:
            seed_all(seed)  # timm and torchvision use the global generators of random, numpy and torch
        try:
            return *self.load(self.source, self.transform, index), index
        except BadImage as error:
            return index, str(error)


class _OrderSampler:
    """Batch sampler of a DataLoader, for the epoch and step that are set before each pass."""

    def __init__(self, order: Order):
        self.order, self.epoch, self.start = order, 0, 0

    def __iter__(self) -> Iterator[list[Key]]:
        return self.order.batches(self.epoch, self.start)


def _split_bad(samples: list) -> tuple[list, Bad]:
    """Samples of `_Samples`: (image, label, index), and (index, reason)."""
    return [sample for sample in samples if len(sample) == 3], [sample for sample in samples if len(sample) == 2]


def _fill(samples: list) -> tuple[list, Bad]:
    """Replace bad samples by others of the batch, so that it keeps its size."""
    good, bad = _split_bad(samples)
    if not good:
        raise DataError(f"all {len(bad)} images of a batch are unreadable; the first: {bad[0][1]}")
    return [good[i % len(good)] for i in range(len(samples))], bad


def _collate_train(samples: list) -> Batch:
    return _stack(*_fill(samples))


def _collate_eval(samples: list) -> Batch:
    good, bad = _split_bad(samples)
    if not good:
        return Batch(torch.empty(0, 3, 1, 1, dtype=torch.uint8), torch.empty(0).long(), torch.empty(0).long(), bad)
    return _stack(good, bad)


def _stack(samples: list, bad: Bad) -> Batch:
    images, labels, indices = zip(*samples, strict=True)
    stacked = torch.stack(labels) if isinstance(labels[0], Tensor) else torch.tensor(labels)
    return Batch(torch.stack(images), stacked, torch.tensor(indices), bad)


def _collate_objects_train(samples: list) -> ObjectBatch:
    return _object_batch(*_fill([_pack(sample) if len(sample) == 3 else sample for sample in samples]))


def _pack(sample: tuple[Tensor, Target, int]) -> tuple[Tensor, Target, int]:
    image, target, index = sample
    return image, target | ({"masks": pack_masks(target["masks"])} if "masks" in target else {}), index


def _collate_objects_eval(samples: list) -> ObjectBatch:
    good, bad = _split_bad(samples)
    without_masks = [(image, {key: target[key] for key in ("boxes", "labels")}, i) for image, target, i in good]
    return _object_batch(without_masks, bad)


def _object_batch(samples: Sequence[tuple[Tensor, Target, int]], bad: Bad) -> ObjectBatch:
    indices = torch.tensor([index for _, _, index in samples], dtype=torch.long)
    return ObjectBatch([image for image, _, _ in samples], [target for _, target, _ in samples], indices, bad)


class _TrainLoader(Generic[AnyBatch]):
    """Decodes and augments samples in `workers` processes, in the order that seed and epoch give.

    Bad images are replaced by others of the batch.
    """

    load: LoadSample
    collate: Callable[[list], AnyBatch]

    def __init__(
        self,
        source: Any,
        transform: Transform,
        order: Order,
        workers: int | None = None,
        pin_memory: bool = False,
        load: LoadSample | None = None,
    ):
        self.source, self.order, self.sampler = source, order, _OrderSampler(order)
        samples = _Samples(source, transform, load or self.load)
        self.loader = _data_loader(samples, self.sampler, self.collate, workers, pin_memory, persistent=True)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[AnyBatch]:
        self.sampler.epoch, self.sampler.start = epoch, start
        return iter(self.loader)


class FileLoader(_TrainLoader[Batch]):
    """Training batches of images, or with another `load` of images and masks."""

    load, collate = staticmethod(load_labelled), staticmethod(_collate_train)


class ObjectLoader(_TrainLoader[ObjectBatch]):
    """Training batches of images with objects."""

    load, collate = staticmethod(load_objects), staticmethod(_collate_objects_train)


class _EvalLoader(Generic[AnyBatch]):
    """Every image once, in order; process `rank` gets every `world_size`-th. Bad images are left out."""

    load: LoadSample
    collate: Callable[[list], AnyBatch]

    def __init__(
        self,
        source: Any,
        transform: Transform,
        batch_size: int,
        workers: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        pin_memory: bool = False,
        load: LoadSample | None = None,
    ):
        self.batches = eval_batches(len(source), batch_size, rank, world_size)
        samples = _Samples(source, transform, load or self.load)
        self.loader = _data_loader(samples, self.batches, self.collate, workers, pin_memory)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[AnyBatch]:
        return iter(self.loader)


class EvalLoader(_EvalLoader[Batch]):
    """Batches of images, or with another `load` of images and masks."""

    load, collate = staticmethod(load_labelled), staticmethod(_collate_eval)


class ObjectEvalLoader(_EvalLoader[ObjectBatch]):
    """Batches of images with boxes and labels; without masks, which the metric takes from `ground_truth`."""

    load, collate = staticmethod(load_objects), staticmethod(_collate_objects_eval)

    def __init__(self, source: ObjectSource, *args: Any, **kwargs: Any):
        super().__init__(source, EvalObjects(), *args, **kwargs)


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


class Memory(NamedTuple):
    """A source decoded into tensors."""

    images: Tensor  # (N, 3, H, W) uint8
    labels: Tensor  # (N,) int64; multi-label: (N, K) float32; or masks (N, H, W) uint8
    indices: Tensor  # (N,) int64 on the CPU, in the source
    bad: Bad

    def to(self, device: torch.device | str) -> "Memory":
        return self._replace(images=self.images.to(device), labels=self.labels.to(device))

    def batch(self, positions: Tensor) -> Batch:
        on_device = positions.to(self.images.device, non_blocking=True)
        return Batch(self.images[on_device], self.labels[on_device], self.indices[positions], [])


class MemoryLoader:
    """Training batches of a decoded source, without work for the CPU."""

    def __init__(self, memory: Memory, order: Order):
        self.memory, self.order = memory, order

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        for keys in self.order.batches(epoch, start):
            yield self.memory.batch(torch.tensor([index for index, _ in keys]))


class MemoryEvalLoader:
    """Every image of a decoded source once, in order; process `rank` gets every `world_size`-th."""

    def __init__(self, memory: Memory, batch_size: int, rank: int = 0, world_size: int = 1):
        self.memory, self.batch_size = memory, batch_size
        self.positions = torch.arange(rank, len(memory.labels), world_size)

    def __len__(self) -> int:
        return -(-len(self.positions) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for positions in self.positions.split(self.batch_size):
            yield self.memory.batch(positions)


def decode_all(
    source: Any, transform: Transform, workers: int | None = None, load: LoadSample = load_labelled
) -> Memory:
    """Decode every sample of a source into tensors. Bad images are left out."""
    chunks = eval_batches(len(source), 64)  # small enough for the shared memory of a container
    loader = _data_loader(_Samples(source, transform, load), chunks, _collate_eval, workers, pin_memory=False)
    batches: list[Batch] = list(loader)
    bad = [entry for batch in batches for entry in batch.bad]
    batches = [batch for batch in batches if len(batch.labels)]
    if not batches:
        raise DataError(f"none of the {len(bad)} images can be read; the first: {bad[0][1]}")
    images, labels = torch.cat([batch.images for batch in batches]), torch.cat([batch.labels for batch in batches])
    return Memory(images, labels, torch.cat([batch.indices for batch in batches]), bad)


def decode_once(source: Any, decode: Callable[[Any], Memory], folder: str | Path, key: Sequence[Any]) -> Memory:
    """Map a decoded source from a file of `folder`, which the first process with this source and `key` writes.

    Processes that map one file share its memory.
    """
    names = [source.name(index) for index in range(len(source))]
    digest = hashlib.sha256(json.dumps([*key, names], default=str).encode())
    digest.update(np.asarray(getattr(source, "labels", [])).tobytes())
    file = Path(folder) / f"{digest.hexdigest()[:16]}.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file.with_suffix(".lock")):
        if not file.is_file():
            memory = decode(source)
            tensors = {name: getattr(memory, name).contiguous() for name in ("images", "labels", "indices")}
            with replaced_file(file) as temporary:
                save_file(tensors, temporary, {"bad": json.dumps(memory.bad)})
    with safe_open(file, "pt") as stored:
        bad = [(index, reason) for index, reason in json.loads(stored.metadata()["bad"])]
        images, labels, indices = (stored.get_tensor(name) for name in ("images", "labels", "indices"))
    return Memory(images, labels, indices, bad)


def cached_image_size(source: Source, image_size: int, max_side: int = 96, max_bytes: int = 2 * 2**30) -> int | None:
    """The side at which to decode a source of small images into memory, None if it is too large.

    Judged by 32 images: all sides at most `max_side` px, the whole source at most `max_bytes`. Square images of one
    size keep it, others are resized to `image_size`.
    """
    sizes = sampled_sizes(source)
    if not sizes or max(max(size) for size in sizes) > max_side:
        return None
    width, height = next(iter(sizes))
    side = width if len(sizes) == 1 and width == height else image_size
    return side if len(source) * 3 * side * side <= max_bytes else None


def choose_cache(
    cache: bool | str, train: Any, val: Any, image_size: int, interpolation: str, workers: int | None
) -> Callable[[Any], Memory] | None:
    """The function that decodes a source into memory, None if its files are read; "auto" decodes small images.

    Images with masks must have one size: judged by 32 of them.
    """
    if cache is False:
        return None
    if hasattr(train, "labels"):
        limits: dict[str, int] = {"max_side": image_size, "max_bytes": 2**40} if cache is True else {}
        side = cached_image_size(train, image_size, **limits) or (image_size if cache is True else None)
        if side is None:
            return None
        return partial(decode_all, transform=MemoryTransform(side, interpolation), workers=workers)
    sizes = [sampled_sizes(source) for source in (train, val)]
    if any(len(shapes) != 1 for shapes in sizes):
        if cache is True:
            raise DataError("data.cache=true needs images of one size, got several. Set data.cache=false.")
        return None
    num_bytes = sum(4 * len(source) * math.prod(*shapes) for source, shapes in zip((train, val), sizes, strict=True))
    if cache == "auto" and num_bytes > MASK_CACHE_BYTES:
        return None
    return partial(decode_all, transform=EvalPair(), workers=workers, load=load_pair)


def sampled_sizes(source: Any, count: int = 32) -> set[tuple[int, int]]:
    """Sizes (width, height) of up to `count` readable images of a source."""
    sizes = set()
    for index in np.linspace(0, len(source) - 1, num=min(count, len(source)), dtype=int):
        try:
            sizes.add(source.read(int(index)).size)
        except BadImage:
            continue
    return sizes


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, numpy, torch on the CPU and, if initialised, on the GPU.

    torch.manual_seed before CUDA is initialised would queue a call, with its stack trace, for every sample.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def usable_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _data_loader(
    samples: Dataset, batches: Any, collate: Callable, workers: int | None, pin_memory: bool, persistent: bool = False
) -> DataLoader:
    workers = min(16, max(0, usable_cores() - 1)) if workers is None else workers
    return DataLoader(
        samples,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=pin_memory,
        persistent_workers=persistent and workers > 0,
        prefetch_factor=2 if workers else None,
        worker_init_fn=_init_worker,
    )


def _init_worker(_: int) -> None:
    """Use one thread, and leave signals to the main process: schedulers send them to every process of a job."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS and Windows
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_on_sigterm_of_parent, daemon=True).start()


def _exit_on_sigterm_of_parent() -> None:
    """Ignore SIGTERM from elsewhere; at its exit, Python waits for workers that it has sent SIGTERM."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
