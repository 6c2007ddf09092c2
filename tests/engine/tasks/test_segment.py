"""Training of segmenters on the CPU, from memory and from files."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import saccade
from saccade.data.sources.base import DataError
from saccade.engine.recipe import load_recipe
from saccade.engine.train import assemble, train
from saccade.tasks.load import card_of, load
from tests.engine.runs import rows

TINY = "{dims: [8, 16, 16, 16], depths: [1, 1, 1, 1], heads: [1, 1, 1, 1], projection: 0, super_token: [4, 2, 1, 1]}"
SMALL = ["task=segmentation", "model={name: svit_nano, head: fpn, head_kwargs: {dim: 16, branch_dim: 16}}",
         f"model.kwargs={TINY}", "data.path=scenes", "data.scenes=40", "data.image_size=32", "data.workers=0",
         "batch_size=10", "epochs=2", "trainer.log_every=1", "trainer.accelerator=cpu",
         "trainer.deterministic=false"]  # fmt: skip


def recipe(*changes):
    return load_recipe(None, [*SMALL, *changes])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run, shared by the tests of its files."""
    out = tmp_path_factory.mktemp("run")
    return train(recipe("ema.decay=0.5"), out, command="saccade train …", progress=False)


def test_segmenter_trains_on_shapes(tmp_path):
    """Two classes: a square and its background."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 6)):
        for i in range(count):
            mask = np.zeros((32, 40), np.uint8)
            top, left = rng.integers(2, 14, 2)
            mask[top : top + 14, left : left + 14] = 1
            image = np.where(mask[..., None], (200, 60, 60), (60, 90, 160)) + rng.integers(-20, 20, (32, 40, 3))
            for kind, pixels in (("images", image), ("masks", mask)):
                folder = tmp_path / "set" / kind / split
                folder.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
    plan = recipe(f"data.path={tmp_path / 'set'}", "epochs=32", "batch_size=8", "optimizer.lr=5e-3",
                  "schedule.warmup_epochs=0.5", "augment.resize=[0.8, 1.25]", "trainer.val_every=32")  # fmt: skip
    result = train(plan, tmp_path / "run", progress=False).result
    assert result["classes"] == 2
    assert result["final"]["miou"] > 80  # predicting background everywhere scores 42
    assert result["final"]["aacc"] > 90


def test_run_writes_metrics_and_report(finished):
    result = json.loads((finished.out / "result.json").read_text())
    assert result == finished.result
    assert (result["model"], result["task"], result["score"]) == ("svit_nano+fpn", "segmentation", "miou")
    assert (result["steps"], result["train_images"], result["val_images"]) == (8, 40, 10)
    assert set(result["final"]) == {"count", "loss", "miou", "macc", "aacc", "bad"}
    logged = rows(finished.out)
    assert [int(row["step"]) for row in logged if row["val_miou"]] == [4, 8]
    assert [int(row["step"]) for row in logged if row["train_aacc"]] == list(range(1, 9))
    page = (finished.out / "report.html").read_text()
    assert not re.search(r'(src|href)="(?!data:|#)', page)  # charts refer to their own parts
    for word in ("mIoU", "IoU per class", "Confusion", "Worst predictions", "ground truth", "% correct"):
        assert word in page
    assert page.count("background: rgb(") == 11  # the legend of the worst predictions, a colour per class
    assert page.count("data:image/jpeg") == 24  # 8 images, each with prediction and ground truth


def test_weights_file_opens_as_segmenter(finished):
    model = load(finished.out)
    card = card_of(model)
    assert (card.task, card.name, card.head, card.num_classes) == ("segmentation", "svit_nano", "fpn", 11)
    assert card.classes[:2] == ["backdrop", "disc"]
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 40, 56)).shape == (1, 11, 40, 56)


def test_checkpoint_evaluation_matches_run(finished):
    evaluation = saccade.evaluate(finished.out / "last.safetensors", "scenes", workers=0)
    for name in ("miou", "macc", "aacc", "loss"):
        assert evaluation[name] == pytest.approx(finished.result["final"][name], abs=0.02)
    assert (evaluation["split"], evaluation["count"]) == ("val", 10)
    options = {"window": 32, "scales": (1.0, 1.5), "flip": True}
    again = saccade.evaluate(finished.out, "scenes", workers=0, **options)
    assert again["inference"] == options | {"stride": 0}
    assert again["miou"] != evaluation["miou"]


def test_stopped_run_ends_with_same_weights(tmp_path):
    uninterrupted = train(recipe("ema.decay=0.5"), tmp_path / "uninterrupted", progress=False)
    plan = recipe("ema.decay=0.5", "trainer.save_every=1")
    from saccade.engine.checkpointing import Checkpointer, StoppedBySignal

    original = Checkpointer.save

    def interrupted(self, trainer, module):
        original(self, trainer, module)
        if module.clock.steps == 6 and not hasattr(interrupted, "done"):
            interrupted.done = True
            raise StoppedBySignal("SIGTERM")

    Checkpointer.save = interrupted
    try:
        first = train(plan, tmp_path / "parts", progress=False)
    finally:
        Checkpointer.save = original
    assert first.stopped
    train(plan, tmp_path / "parts", resume=True, progress=False)
    ours, theirs = (load_file(folder / "last.safetensors") for folder in (tmp_path / "parts", uninterrupted.out))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_images_of_several_sizes_are_read_from_files(tmp_path):
    """They are not cached; an invalid mask is reported and skipped."""
    rng = np.random.default_rng(0)
    for i in range(12):
        size = (30 + 3 * i, 50 - 2 * i)
        for kind, shape in (("images", (*size, 3)), ("masks", size)):
            (tmp_path / kind).mkdir(exist_ok=True)
            high = 256 if kind == "images" else 3
            Image.fromarray(rng.integers(high, size=shape).astype(np.uint8)).save(tmp_path / kind / f"{i:02}.png")
    Image.fromarray(np.full((36, 46), 9, np.uint8)).save(tmp_path / "masks/02.png")
    plan = recipe(f"data.path={tmp_path}", "batch_size=4", "data.val_fraction=0.25", "data.classes=[a, b, c]", "seed=1")
    result = train(plan, tmp_path / "run", progress=False).result
    assert (result["train_images"], result["val_images"], result["unreadable"]) == (9, 3, 1)
    with pytest.raises(DataError, match="needs images of one size"):
        assemble(recipe(f"data.path={tmp_path}", "data.cache=true", "data.classes=[a, b, c]"))


def test_small_images_of_one_size_are_cached():
    sources = assemble(recipe()).sources
    assert sources.train_memory.images.shape == (40, 3, 32, 32)
    assert sources.train_memory.labels.shape == (40, 32, 32)
    assert assemble(recipe("data.cache=false")).sources.train_memory is None


def test_training_starts_from_checkpoint(finished, tmp_path):
    plan = recipe(f"model.checkpoint={finished.out / 'last.safetensors'}", "seed=3")
    result, saved = assemble(plan).model.state_dict(), load_file(finished.out / "last.safetensors")
    assert all(torch.equal(result[name], saved[name]) for name in saved)
