"""Order, seeds and unreadable images: batches depend on (seed, epoch), not on workers or processes."""

from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from saccade.data.loader import (
    EvalLoader,
    FileLoader,
    MemoryEvalLoader,
    MemoryLoader,
    ObjectEvalLoader,
    ObjectLoader,
    Order,
    cached_image_size,
    decode_all,
    decode_once,
)
from saccade.data.open import find_object_splits, open_train_and_val
from saccade.data.sources.base import DataError, Subset, limited
from saccade.data.sources.folder import FolderSource
from saccade.data.sources.masks import load_pair
from saccade.data.sources.objects import trainable_objects
from saccade.data.synthetic.scenes import SceneMasks, SceneObjects, Scenes
from saccade.data.transforms.image import MemoryTransform, eval_transform, train_transform
from saccade.data.transforms.mask import EvalPair
from saccade.data.transforms.objects import EvalObjects, TrainObjects, unpack_masks
from tests.data.coco_files import write

READABLE = [0, 1, 2, 4, 5, 6, 7, 8, 9, 10]  # of the fixture `folder`


def flatten(lists) -> list:
    return [entry for part in lists for entry in part]


def indices(order: Order, epoch: int = 0, start: int = 0) -> list[list[int]]:
    return [[index for index, _ in keys] for keys in order.batches(epoch, start)]


def test_epoch_contains_every_sample_once_in_a_new_order():
    order = Order(100, 10, seed=1)
    first, second = (flatten(indices(order, epoch)) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
    assert first == flatten(indices(Order(100, 10, seed=1)))
    assert first != flatten(indices(Order(100, 10, seed=2)))


@pytest.mark.parametrize(("world_size", "accumulate"), [(2, 1), (4, 1), (1, 3), (2, 3)])
def test_processes_and_accumulation_steps_partition_the_same_batches(world_size, accumulate):
    """Indices and seeds: a recipe takes the same steps however it is distributed."""
    expected = list(Order(100, 24, seed=1).batches(3))
    parts = [list(Order(100, 24, 1, rank, world_size, accumulate).batches(3)) for rank in range(world_size)]
    for number, batch in enumerate(expected):
        pieces = [parts[rank][number * accumulate + i] for i in range(accumulate) for rank in range(world_size)]
        assert flatten(pieces) == batch


def test_order_resumes_in_the_middle_of_an_epoch():
    order = Order(50, 8, seed=4, accumulate=2)
    assert list(order.batches(2, start=3)) == list(order.batches(2))[6:]


def test_repeated_augmentation_shows_a_third_of_the_samples_three_times_with_different_seeds():
    keys = flatten(Order(90, 9, repeats=3).batches(0))
    assert np.bincount(np.bincount([index for index, _ in keys], minlength=90)).tolist() == [60, 0, 0, 30]
    assert len({seed for _, seed in keys}) == 90


def test_invalid_orders_raise():
    with pytest.raises(DataError, match=r"batch_size \(16\) must not exceed the number of images \(10\)"):
        Order(10, 16)
    with pytest.raises(DataError, match=r"\(16\) must be divisible by 4 processes x 3 accumulation steps"):
        Order(100, 16, world_size=4, accumulate=3)


@pytest.fixture
def folder(tmp_path):
    """Twelve noise images of two classes; a/3.png is truncated and b/5.png is empty (indices 3 and 11)."""
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(6):
            Image.fromarray(rng.integers(0, 256, (40, 50, 3), np.uint8)).save(tmp_path / name / f"{i}.png")
    (tmp_path / "a/3.png").write_bytes((tmp_path / "a/3.png").read_bytes()[:300])
    (tmp_path / "b/5.png").write_bytes(b"")
    return FolderSource(tmp_path)


def test_number_of_workers_does_not_change_batches(folder):
    transform = train_transform(32, auto_augment="rand-m9-n2")
    single, parallel = (FileLoader(folder, transform, Order(12, 4), workers) for workers in (0, 2))
    for epoch in (0, 1):
        for a, b in zip(single.epoch(epoch), parallel.epoch(epoch), strict=True):
            assert torch.equal(a.images, b.images)
            assert a.labels.tolist() == b.labels.tolist()
    resumed = list(parallel.epoch(1, start=2))
    assert torch.equal(resumed[0].images, list(single.epoch(1))[2].images)


def test_file_loader_replaces_unreadable_images(folder):
    batches = list(FileLoader(folder, train_transform(32), Order(12, 6), 0).epoch(0))
    assert [len(batch.labels) for batch in batches] == [6, 6]
    bad = dict(entry for batch in batches for entry in batch.bad)
    assert sorted(bad) == [3, 11]
    assert "a/3.png" in bad[3]
    assert "b/5.png" in bad[11]
    assert set(torch.cat([batch.indices for batch in batches]).tolist()) == set(READABLE)


def test_eval_loader_leaves_out_unreadable_images(folder):
    batches = list(EvalLoader(folder, eval_transform(32), 5, workers=0))
    assert torch.cat([batch.indices for batch in batches]).tolist() == READABLE
    parts = [
        torch.cat([batch.indices for batch in EvalLoader(folder, eval_transform(32), 5, 0, rank, 2)]).tolist()
        for rank in (0, 1)
    ]
    assert parts == [[0, 2, 4, 6, 8, 10], [1, 5, 7, 9]]


def test_batch_without_readable_images_raises(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").write_bytes(b"")
    loader = FileLoader(FolderSource(tmp_path), train_transform(32), Order(2, 2), 0)
    with pytest.raises(DataError, match="all 2 images of a batch are unreadable"):
        list(loader.epoch(0))
    with pytest.raises(DataError, match="none of the 2 images"):
        decode_all(FolderSource(tmp_path), MemoryTransform(8), 0)


def test_decode_once_maps_what_the_first_call_decoded(folder, tmp_path):
    decode = partial(decode_all, transform=MemoryTransform(32), workers=0)
    calls = []
    counted = lambda source: calls.append(source) or decode(source)  # noqa: E731
    first = decode_once(folder, counted, tmp_path / "cache", ["key"])
    second = decode_once(folder, counted, tmp_path / "cache", ["key"])
    expected = decode(folder)
    assert len(calls) == 1
    for memory in (first, second):
        assert all(torch.equal(memory[i], expected[i]) for i in range(3))
        assert memory.bad == expected.bad
    decode_once(folder, counted, tmp_path / "cache", ["other key"])
    decode_once(limited(folder, 3), counted, tmp_path / "cache", ["key"])
    relabelled = Subset(folder, range(len(folder)))
    relabelled.labels = relabelled.labels[::-1].copy()
    assert torch.equal(decode_once(relabelled, counted, tmp_path / "cache", ["key"]).labels, decode(relabelled).labels)
    assert len(calls) == 4


def test_decode_all_keeps_readable_images_and_their_indices(folder):
    memory = decode_all(folder, MemoryTransform(32), workers=0)
    assert memory.images.shape == (10, 3, 32, 32)
    assert memory.indices.tolist() == READABLE
    assert memory.labels.tolist() == [0] * 5 + [1] * 5
    assert [index for index, _ in memory.bad] == [3, 11]
    expected = torch.stack([eval_transform(32, 1.0)(folder.read(i)) for i in READABLE])
    assert torch.equal(memory.images, expected)


def test_memory_loaders_return_the_decoded_images(folder):
    memory = decode_all(folder, MemoryTransform(32), workers=0)
    position = {index: i for i, index in enumerate(READABLE)}
    batches = list(MemoryLoader(memory, Order(10, 5)).epoch(0))
    assert sorted(flatten(batch.indices.tolist() for batch in batches)) == READABLE
    for batch in (*batches, *MemoryEvalLoader(memory, 4)):
        positions = [position[index] for index in batch.indices.tolist()]
        assert torch.equal(batch.images, memory.images[positions])
        assert torch.equal(batch.labels, memory.labels[positions])
    assert [batch.indices.tolist() for batch in MemoryEvalLoader(memory, 4, 1, 2)] == [[1, 4, 6, 8], [10]]
    assert len(MemoryEvalLoader(memory, 4)) == 3


def test_masks_are_batched_as_labels():
    source = SceneMasks(4, 16)
    (batch,) = EvalLoader(source, EvalPair(), 4, 0, load=load_pair)
    assert (batch.labels.shape, batch.labels.dtype) == ((4, 16, 16), torch.uint8)
    assert batch.labels[2].tolist() == source.read_mask(2).tolist()


def test_small_images_are_cached_at_their_own_or_the_input_size(folder):
    assert cached_image_size(folder, 64) == 64  # 40 x 50 px: resized
    assert cached_image_size(Scenes(20, 32), 64) == 32  # square, of one size
    assert cached_image_size(Scenes(20, 128), 64) is None
    assert cached_image_size(Scenes(20, 32), 64, max_bytes=20 * 3 * 32 * 32) == 32
    assert cached_image_size(Scenes(20, 32), 64, max_bytes=20 * 3 * 32 * 32 - 1) is None


def test_object_batches_do_not_depend_on_workers():
    scenes, order = SceneObjects(8, 32), Order(8, 4, seed=3)
    batches = [list(ObjectLoader(scenes, TrainObjects(32, "resized"), order, workers).epoch(1)) for workers in (0, 2)]
    assert len(batches[0]) == 2
    for single, parallel in zip(*batches, strict=True):
        assert torch.equal(single.indices, parallel.indices)
        for a, b in zip(single.images, parallel.images, strict=True):
            assert torch.equal(a, b)
        for a, b in zip(single.labels, parallel.labels, strict=True):
            assert all(torch.equal(a[key], b[key]) for key in a)


def test_object_loader_packs_the_masks_and_eval_loader_drops_them():
    scenes = SceneObjects(4, 36)
    (batch,) = ObjectLoader(scenes, EvalObjects(), Order(4, 4), workers=0).epoch(0)
    for target, index in zip(batch.labels, batch.indices.tolist(), strict=True):
        expected = trainable_objects(scenes.objects(index), (36, 36))
        assert torch.equal(unpack_masks(target["masks"], 36), torch.from_numpy(expected.masks))
        assert torch.equal(target["boxes"], torch.from_numpy(expected.boxes))
    for batch in ObjectEvalLoader(scenes, 2, 0):
        assert [set(target) for target in batch.labels] == [{"boxes", "labels"}] * 2


def test_repeated_object_samples_keep_their_own_masks():
    """With repeated augmentation an image occurs several times in a batch, each time with other masks."""
    scenes = SceneObjects(4, 32)
    (batch,) = ObjectLoader(scenes, TrainObjects(32, "resized"), Order(4, 4, repeats=2), workers=0).epoch(0)
    assert len(set(batch.indices.tolist())) == 2
    for image, target in zip(batch.images, batch.labels, strict=True):
        masks = unpack_masks(target["masks"], image.shape[-1])
        assert masks.shape[1:] == image.shape[1:]
        assert len(masks) == len(target["boxes"])


def test_unreadable_object_images_are_replaced_in_training_and_left_out_in_evaluation(tmp_path):
    write(tmp_path)
    (tmp_path / "train" / "b.png").write_bytes(b"not an image")
    source, _ = open_train_and_val(tmp_path, val_path=tmp_path, find=find_object_splits)
    (batch,) = ObjectLoader(source, EvalObjects(), Order(3, 3), workers=0).epoch(0)
    assert len(batch.images) == 3
    assert [index for index, _ in batch.bad] == [2]
    assert set(batch.indices.tolist()) == {0, 1}
    batches = list(ObjectEvalLoader(source, 2, workers=0))
    assert [batch.indices.tolist() for batch in batches] == [[0, 1], []]
    assert "b.png" in batches[1].bad[0][1]
