"""Unreadable images, the batch stream, and the choice between files and memory."""

import logging

import numpy as np
import pytest
import torch
from PIL import Image

from saccade.data.loader import Memory, MemoryLoader, Order, UnreadableImages
from saccade.data.sources.base import DataError
from saccade.data.transforms.custom import with_custom
from saccade.engine.clock import Clock
from saccade.engine.loaders import BatchStream, Loaders, Partition, open_sources
from saccade.engine.recipe import load_recipe
from saccade.engine.train import TASKS, assemble, train
from tests.engine.runs import recipe

SCENES = ["data.path=scenes", "data.scenes=20", "data.workers=0"]
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
    sources = open_sources(load_recipe(None, SCENES), 32)
    assert sources.train_memory.images.shape == (20, 3, 32, 32)
    assert sources.train_count == 20
    assert open_sources(load_recipe(None, [*SCENES, "data.cache=false"]), 32).train_memory is None


@pytest.mark.parametrize("task", ["classification", "segmentation", "detection"])
def test_limit_takes_a_subset_of_both_splits(task):
    head = [] if task == "classification" else ["model.head=fpn"]
    plan = load_recipe(None, [f"task={task}", *head, *SCENES, "data.scenes=200", "data.limit=30", "data.cache=false"])
    sources = open_sources(plan, 32)
    assert (len(sources.train), len(sources.val)) == (30, 30 if task != "detection" else 25)
    if task == "classification":
        assert np.bincount(sources.train.labels).tolist() == [3] * 10, "equally many of each class"
    again = open_sources(plan, 32)
    assert [again.train.name(i) for i in range(30)] == [sources.train.name(i) for i in range(30)]


def test_missing_path_names_what_is_expected():
    with pytest.raises(DataError, match=r"^no data: give --data PATH \(a folder or CSV list of videos"):
        open_sources(load_recipe(None, ["task=video"]), 32)


@pytest.mark.parametrize(("steps", "expected"), [(0, [0, 1, 2, 3]), (3, [3]), (4, [4, 5]), (6, [])])
def test_stream_ends_at_next_validation(steps, expected):
    """Two steps per epoch, three epochs, validation every two epochs; a resumed run starts at its step."""
    order, clock = Order(4, 2), Clock(6)
    clock.steps = steps
    memory = Memory(torch.zeros(4, 3, 1, 1), torch.arange(4), torch.arange(4), [])
    loader = MemoryLoader(memory, order)
    stream = BatchStream(Loaders(order, loader, None), clock, val_every=2)
    assert stream.steps_left() == len(expected)
    batches = list(stream)
    every = [batch.indices.tolist() for epoch in range(3) for batch in loader.epoch(epoch)]
    assert [batch.indices.tolist() for batch in batches] == [every[step] for step in expected]


def darken(image, *annotation):
    """A user's augmentation, for the tests: the second argument is a mask or objects."""
    dark = Image.fromarray(np.array(image) // 4)
    return (dark, *annotation) if annotation else dark


@pytest.mark.parametrize(
    ("task", "head"), [("classification", ""), ("segmentation", "fpn"), ("detection", "mask_rcnn")]
)
def test_custom_augmentation_is_called_on_training_images_only(task, head):
    changes = [f"task={task}", f"model={{name: svit_nano, head: '{head}'}}", *SCENES, "augment.crop=none",
               "batch_size=4", "augment.distort=false", "data.image_size=32"]  # fmt: skip
    brightness = []
    for custom in ("", "tests.engine.test_loaders.darken"):
        plan = load_recipe(None, [*changes, f"augment.custom={custom}", "data.cache=false"])
        model, _, sources, preprocess = assemble(plan)
        module = TASKS[task](model, plan, sources, preprocess, Clock(10), "")
        loaders = module.make_loaders(Partition.of(plan, sources, torch.device("cpu")))
        brightness.append([float(next(iter(batches)).images[0].float().mean())
                           for batches in (loaders.train.epoch(0), loaders.val)])  # fmt: skip
    (plain, val), (dark, same_val) = brightness
    assert plain / 5 < dark < plain / 3.5
    assert val == same_val


def test_custom_augmentation_is_not_cached_and_errors_name_it():
    plan = load_recipe(None, [*SCENES, "augment.custom=tests.engine.test_loaders.darken"])
    assert open_sources(plan, 32).train_memory is None
    with pytest.raises(DataError, match=r"augment\.custom: expected package\.function, got 'nothing\.here'"):
        with_custom("nothing.here", None)
