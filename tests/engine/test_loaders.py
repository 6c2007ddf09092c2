"""Unreadable images, the batch stream, and the choice between files and memory."""

import logging

import numpy as np
import pytest
import torch
from PIL import Image

from saccade.data.loader import Memory, MemoryLoader, Order
from saccade.data.sources.base import DataError
from saccade.engine.clock import Clock
from saccade.engine.loaders import Loaders, UnreadableImages, check_path, open_sources
from saccade.engine.recipe import Data
from saccade.engine.train import train
from tests.engine.runs import recipe

DAMAGED = ("dark/3.jpg", "dark/7.jpg", "light/0.jpg")


@pytest.fixture
def photos(tmp_path):
    """Two classes of noise, large enough to be read file by file; three files are damaged."""
    rng = np.random.default_rng(0)
    for name in ("dark", "light"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(20):
            low = 0 if name == "dark" else 150
            image = rng.integers(low, low + 100, (110, 120, 3), np.uint8)
            Image.fromarray(image).save(tmp_path / "data" / name / f"{i}.jpg")
    for name in DAMAGED:
        content = (tmp_path / "data" / name).read_bytes()
        (tmp_path / "data" / name).write_bytes(content[:200])
    return tmp_path / "data"


@pytest.mark.parametrize("cache", ["false", "true"])
def test_unreadable_images_are_skipped_and_counted(photos, tmp_path, cache, caplog):
    changes = ("batch_size=8", f"data.cache={cache}", "augment.auto_augment=rand-m9-n2", "epochs=3")
    with caplog.at_level(logging.WARNING):
        result = train(recipe(f"data.path={photos}", *changes), tmp_path / "run", progress=False).result
    assert result["unreadable"] == len(DAMAGED)
    page = (tmp_path / "run/report.html").read_text()
    for name in DAMAGED:
        assert name in page
        assert sum(name in message for message in caplog.messages) == 1, "logged once, with its path"
    assert result["final"]["top1"] >= 50


def test_too_many_unreadable_images_stop_the_run(photos, tmp_path):
    plan = recipe(f"data.path={photos}", "batch_size=8", "data.max_unreadable=2")
    with pytest.raises(DataError, match=r"3 images cannot be read, more than data\.max_unreadable=2 allows"):
        train(plan, tmp_path / "run", progress=False)


def test_unreadable_images_are_counted_once_per_split():
    unreadable = UnreadableImages(2)
    unreadable.add([(3, "a")])
    unreadable.add([(3, "a")])
    unreadable.add([(3, "b")], "validation")
    assert len(unreadable) == 2
    with pytest.raises(DataError, match="3 images cannot be read"):
        unreadable.add([(4, "c")])


def test_small_images_are_cached():
    sources = open_sources(Data(path="scenes", scenes=20, workers=0), 32, seed=0)
    assert sources.train_memory.images.shape == (20, 3, 32, 32)
    assert sources.train_count == 20
    assert open_sources(Data(path="scenes", scenes=20, cache=False), 32, seed=0).train_memory is None


def test_missing_path_names_what_is_expected():
    with pytest.raises(DataError, match=r"^no data: give --data PATH \(a folder\)\.$"):
        check_path(Data(), "a folder")


@pytest.mark.parametrize(("steps", "expected"), [(0, [0, 1, 2, 3]), (3, [3]), (4, [4, 5]), (6, [])])
def test_stream_ends_at_next_validation(steps, expected):
    """Two steps per epoch, three epochs, validation every two epochs; a resumed run starts at its step."""
    order, clock = Order(4, 2), Clock(6)
    clock.steps = steps
    memory = Memory(torch.zeros(4, 3, 1, 1), torch.arange(4), torch.arange(4), [])
    loader = MemoryLoader(memory, order)
    batches = list(Loaders(order, loader, None).stream(clock, val_every=2))
    every = [batch.indices.tolist() for epoch in range(3) for batch in loader.epoch(epoch)]
    assert [batch.indices.tolist() for batch in batches] == [every[step] for step in expected]
