"""Order, dice and bad pictures: what a run sees follows from (seed, epoch), not from processes or luck."""

import numpy as np
import pytest
import torch
from PIL import Image

from saccade.data.loader import (
    EvalLoader,
    FileLoader,
    MemoryEvalLoader,
    MemoryLoader,
    Order,
    cached_image_size,
    decode_all,
)
from saccade.data.sources.base import DataError
from saccade.data.sources.folder import FolderSource
from saccade.data.synthetic.scenes import Scenes
from saccade.data.transforms.image import MemoryTransform, eval_transform, train_transform


def joined(lists) -> list:
    return [entry for part in lists for entry in part]


def indices(order: Order, epoch: int = 0, start: int = 0) -> list[list[int]]:
    return [[index for index, _ in keys] for keys in order.batches(epoch, start)]


def test_an_epoch_shows_every_picture_once_in_a_new_order():
    order = Order(100, 10, seed=1)
    first, second = (joined(indices(order, epoch)) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
    assert first == joined(indices(Order(100, 10, seed=1)))
    assert first != joined(indices(Order(100, 10, seed=2)))


@pytest.mark.parametrize(("world", "parts"), [(2, 1), (4, 1), (1, 3), (2, 3)])
def test_processes_and_parts_share_the_batches_of_one_process(world, parts):
    """Picture by picture, dice included: the same recipe takes the same steps however it is spread."""
    whole = list(Order(100, 24, seed=1).batches(3))
    shares = [list(Order(100, 24, 1, rank, world, parts).batches(3)) for rank in range(world)]
    for number, batch in enumerate(whole):
        pieces = [shares[rank][number * parts + part] for part in range(parts) for rank in range(world)]
        assert joined(pieces) == batch


def test_a_run_continues_in_the_middle_of_an_epoch():
    order = Order(50, 8, seed=4, accumulate=2)
    assert list(order.batches(2, start=3)) == list(order.batches(2))[6:]


def test_repeated_augmentation_shows_a_third_of_the_pictures_three_times_with_other_dice():
    keys = joined(Order(90, 9, repeats=3).batches(0))
    assert len(keys) == 90
    counts = np.bincount([index for index, _ in keys], minlength=90)
    assert set(counts) == {0, 3}
    assert len({die for _, die in keys}) == 90


def test_orders_that_cannot_be():
    with pytest.raises(DataError, match="batch_size \\(16\\) must not exceed the number of images \\(10\\)"):
        Order(10, 16)
    with pytest.raises(DataError, match="must be divisible by 4 processes x 3"):
        Order(100, 16, world_size=4, accumulate=3)


@pytest.fixture
def folder(tmp_path):
    """Twelve noisy pictures of two classes; two files are damaged."""
    noise = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(6):
            Image.fromarray(noise.integers(0, 256, (40, 50, 3), np.uint8)).save(tmp_path / name / f"{i}.png")
    (tmp_path / "a/3.png").write_bytes((tmp_path / "a/3.png").read_bytes()[:300])
    (tmp_path / "b/5.png").write_bytes(b"")
    return FolderSource(tmp_path)


def test_the_number_of_loader_processes_changes_nothing(folder):
    change = train_transform(32, auto_augment="rand-m9-n2")
    alone, helped = (FileLoader(folder, change, Order(12, 4), workers) for workers in (0, 2))
    for epoch in (0, 1):
        for a, b in zip(alone.epoch(epoch), helped.epoch(epoch), strict=True):
            torch.testing.assert_close(a.images, b.images, atol=0, rtol=0)
            assert a.labels.tolist() == b.labels.tolist()
    late = list(helped.epoch(1, start=2))
    torch.testing.assert_close(late[0].images, list(alone.epoch(1))[2].images, atol=0, rtol=0)


def test_in_training_a_bad_picture_is_named_and_replaced(folder):
    batches = list(FileLoader(folder, train_transform(32), Order(12, 6), 0).epoch(0))
    assert [len(batch.labels) for batch in batches] == [6, 6]
    bad = [entry for batch in batches for entry in batch.bad]
    assert sorted(index for index, _ in bad) == [3, 11]
    assert any("a/3.png" in reason for _, reason in bad)
    used = torch.cat([batch.indices for batch in batches]).tolist()
    assert not {3, 11} & set(used)


def test_in_evaluation_a_bad_picture_is_left_out(folder):
    batches = list(EvalLoader(folder, eval_transform(32), 5, workers=0))
    assert torch.cat([batch.indices for batch in batches]).tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10]
    halves = [torch.cat([b.indices for b in EvalLoader(folder, eval_transform(32), 5, 0, rank, 2)]) for rank in (0, 1)]
    assert sorted(torch.cat(halves).tolist()) == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10]


def test_a_batch_without_a_single_good_picture_stops(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").write_bytes(b"")
    loader = FileLoader(FolderSource(tmp_path), train_transform(32), Order(2, 2), 0)
    with pytest.raises(DataError, match="all 2 images of a batch are unreadable"):
        list(loader.epoch(0))
    with pytest.raises(DataError, match="none of the 2 images"):
        decode_all(FolderSource(tmp_path), MemoryTransform(8), 0)


def test_decoding_once_keeps_what_is_good_and_knows_what_it_is(folder):
    memory = decode_all(folder, MemoryTransform(32), workers=0)
    assert memory.images.shape == (10, 3, 32, 32)
    assert memory.indices.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10]
    assert memory.labels.tolist() == [0] * 5 + [1] * 5
    assert len(memory.bad) == 2
    straight = torch.stack([eval_transform(32, 1.0)(folder.read(int(i))) for i in memory.indices])
    torch.testing.assert_close(memory.images, straight, atol=0, rtol=0)
    loader = MemoryLoader(memory, Order(10, 5))
    for batch in loader.epoch(0):
        for image, index in zip(batch.images, batch.indices, strict=True):
            torch.testing.assert_close(image, straight[memory.indices.tolist().index(int(index))], atol=0, rtol=0)
    assert sum(len(batch.labels) for batch in MemoryEvalLoader(memory, 4)) == 10


def test_small_pictures_are_worth_keeping_decoded(folder):
    assert cached_image_size(folder, 64) == 64  # 40 x 50: brought to the size of the input
    assert cached_image_size(Scenes(20, 32), 64) == 32  # square, of one size: kept
    assert cached_image_size(Scenes(20, 128), 64) is None  # too large
    assert cached_image_size(Scenes(20, 32), 64, max_bytes=20 * 3 * 32 * 32 - 1) is None


@pytest.mark.parametrize("crop", ["resized", "pad", "none"])
@pytest.mark.parametrize("auto", ["", "trivial", "rand-m9-mstd0.5-inc1", "original"])
def test_single_picture_transforms_give_bytes_of_the_right_size(crop, auto):
    image = Image.effect_noise((50, 40), 60).convert("RGB")
    found = train_transform(32, crop=crop, auto_augment=auto, jitter=0.4)(image)
    assert (found.shape, found.dtype) == ((3, 32, 32), torch.uint8)


def test_the_papers_evaluation_protocol():
    """Shorter side to size / crop_pct, then the centre: a red frame of 1/16 disappears at crop 0.875."""
    image = Image.new("RGB", (64, 64), "red")
    image.paste(Image.new("RGB", (56, 56), "blue"), (4, 4))
    cropped, whole = (eval_transform(56, crop)(image) for crop in (0.875, 1.0))
    assert cropped[0].max() == 0
    assert whole[0, 0].float().mean() > 200
