"""Training on clips: rendered and from files, image models on single frames, views, unreadable files."""

import numpy as np
import pytest
import torch

import saccade
from saccade.data.loader import EvalLoader
from saccade.data.sources.videos import VideoFolder
from saccade.data.synthetic.motions import MOTIONS, MotionSet, write_motions
from saccade.data.transforms.clips import EvalClip
from saccade.engine.recipe import RecipeError, load_recipe
from saccade.engine.tasks.classify import ClassificationModule
from saccade.engine.train import train
from saccade.tasks.evaluators import ClassEvaluator
from saccade.tasks.load import card_of, load
from saccade.tasks.predict import make_eval_transform

TINY = (
    "model={name: video_sparseformer_nano, kwargs: {inflation: 2, num_tokens: 4, focus_dim: 32, cortex_dim: 32, "
    "depth: 1, repeats: 1, points: 4, channels: 8, heads: 4}}"
)
SMALL = [
    "task=video",
    "data={path: motions, motions: 32, image_size: 32, frames: 4, workers: 0}",
    "batch_size=16",
    "epochs=2",
    "trainer={accelerator: cpu, log_every: 1}",
]


def recipe(*changes: str):
    return load_recipe(None, [TINY, *SMALL, *changes])


@pytest.fixture(scope="module")
def motions(tmp_path_factory):
    """The motions as MP4 files, with one invalid file per split."""
    root = tmp_path_factory.mktemp("motions")
    write_motions(root, clips=16, size=48, frames=10)
    (root / "train" / "left" / "broken.mp4").write_bytes(b"nothing")
    (root / "val" / "up" / "broken.mp4").write_bytes(b"nothing")
    return root


@pytest.fixture(scope="module")
def finished(tmp_path_factory, motions):
    """A run on files with every augmentation."""
    changes = (f"data.path={motions}", "data.stride=2", "data.views=[2, 3]", "augment.erase=0.5", "augment.mixup=0.8",
               "augment.cutmix=1.0", "augment.auto_augment=rand-m7-n2", "batch_size=8", "epochs=1")  # fmt: skip
    return train(recipe(*changes), tmp_path_factory.mktemp("run"), progress=False)


def test_rendered_clips_train(tmp_path):
    result = train(recipe(), tmp_path, progress=False).result
    assert (result["task"], result["steps"], result["train_images"], result["final"]["count"]) == ("video", 4, 32, 8)
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/jpeg") == 8  # of 8 validation clips
    evaluation, card = saccade.evaluate(tmp_path, "motions"), card_of(load(tmp_path))
    assert (evaluation["split"], evaluation["count"]) == ("val", 8)  # of 32 motions, as in the run's recipe
    assert (card.preprocess.frames, card.preprocess.size, card.classes) == (4, 32, MOTIONS)
    assert evaluation["top1"] in (result["final"]["top1"], result["best"]["top1"])


def test_unreadable_file_is_skipped(finished):
    assert finished.result["unreadable"] == 2
    assert finished.result["train_images"] == 17
    assert finished.result["final"]["count"] == 8
    assert finished.result["final"]["bad"] == 1


def test_too_many_unreadable_files_stop_the_run(tmp_path, motions):
    with pytest.raises(ValueError, match=r"max_unreadable=0 allows: .*broken.mp4: damaged"):
        train(
            recipe(f"data.path={motions}", "data.max_unreadable=0", "batch_size=17", "epochs=1"),
            tmp_path,
            progress=False,
        )


def test_erasing_uses_one_rectangle_for_all_frames(tmp_path, monkeypatch):
    """Frames of a still clip differ only in the erased rectangle, which is filled with noise."""
    prepared = []
    prepare = ClassificationModule.prepare

    def prepare_and_store(self, batch):
        prepared.append(prepare(self, batch))
        return prepared[-1]

    monkeypatch.setattr(ClassificationModule, "prepare", prepare_and_store)
    train(recipe("augment.erase=1.0", "batch_size=32", "epochs=1"), tmp_path, progress=False)
    images, labels = prepared[0]
    still = images[labels == MOTIONS.index("still")]  # (B, 3, T, H, W)
    assert still.shape == (4, 3, 4, 32, 32)
    noisy = (still[:, :, 1:] != still[:, :, :1]).any(1)  # (B, T - 1, H, W)
    assert (noisy == noisy[:, :1]).all()
    for mask in noisy[:, 0]:
        rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
        assert mask.sum() == (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1) > 0


@pytest.mark.shows("SF-65")
def test_views_are_averaged(finished, motions):
    """2 x 3 views in one batch, against each view alone."""
    model = load(finished.out)
    card = card_of(model)
    sizes = card.preprocess
    source = VideoFolder(motions / "val", card.classes)
    batches = EvalLoader(source, make_eval_transform(sizes, (2, 3)), 3, 0)
    batched = ClassEvaluator(8, sizes).evaluate(model, batches).images
    mean, std = (torch.tensor(values).view(3, 1, 1, 1) for values in (sizes.mean, sizes.std))
    for row, index in enumerate(batched["indices"][:3].tolist()):
        views = EvalClip(sizes.size, sizes.frames, sizes.stride, sizes.crop_pct, clips=2, crops=3)(source.read(index))
        with torch.no_grad():
            alone = [model((view.float() / 255 - mean)[None] / std).softmax(1)[0] for view in views]
        average = torch.stack(alone).mean(0)
        assert int(batched["predicted"][row]) == int(average.argmax())
        assert float(batched["confidence"][row]) == pytest.approx(float(average.max()), abs=1e-5)
        assert float(batched["losses"][row]) == pytest.approx(-float(average[source.labels[index]].log()), abs=1e-5)


def test_image_model_gets_middle_frame(tmp_path):
    small = "{num_tokens: 4, focus_dim: 32, cortex_dim: 32, depth: 1, repeats: 1, points: 4, channels: 8, heads: 4}"
    plan = recipe(f"model={{name: sparseformer_nano, kwargs: {small}}}", "epochs=1")
    result = train(plan, tmp_path, progress=False).result
    assert result["final"]["count"] == 8
    assert card_of(load(tmp_path)).preprocess.frames == 1
    middle = MotionSet(8, 32, 1, "val").clips([3])[0]
    assert torch.equal(middle[:, 0], MotionSet(8, 32, 5, "val").clips([3])[0, :, 2])


def test_video_model_needs_video_task(tmp_path):
    with pytest.raises(RecipeError, match=r"takes clips\. Train it with task: video"):
        train(recipe("task=classification", "data.path=scenes"), tmp_path, progress=False)


def test_command_recognises_video_models():
    from saccade.engine.resolve import is_video_model

    assert is_video_model("video_sparseformer_nano")
    assert not is_video_model("svit_nano")
    assert not is_video_model("no_such_model")


def test_training_clips_differ_per_epoch_and_are_reproducible():
    from saccade.data.loader import Order
    from saccade.data.synthetic.motions import MotionLoader

    loader = MotionLoader(MotionSet(16, 32, 2), Order(16, 8, seed=3))
    first, again, second = (torch.cat([batch.images for batch in loader.epoch(e)]) for e in (0, 0, 1))
    assert torch.equal(first, again)
    assert not any((clip == second).flatten(1).all(1).any() for clip in first)
    for batch in loader.epoch(5, start=1):
        assert batch.labels.tolist() == [int(i) % 8 for i in batch.indices]


@pytest.mark.slow
def test_video_model_uses_frame_order(tmp_path):
    """A small model generalises to held-out photographs; with frames reversed it predicts the opposite motion.

    An image model with the same recipe stays near chance. Takes minutes on one core.
    """
    kwargs = (
        "{inflation: 4, num_tokens: 9, focus_dim: 64, cortex_dim: 96, depth: 3, repeats: 2, points: 9, channels: 24}"
    )
    plan = [f"model={{name: video_sparseformer_nano, kwargs: {kwargs}}}", "data.motions=1600", "data.frames=8",
            "epochs=28", "batch_size=64", "optimizer={lr: 2e-3, weight_decay: 0.02, clip_grad: 1.0}",
            "schedule.warmup_epochs=2", "trainer.val_every=8"]  # fmt: skip
    run = train(recipe(*plan), tmp_path / "video", progress=False)
    assert run.result["final"]["top1"] > 70
    source, model = MotionSet(1024, 32, 8, "test"), load(run.out)
    card = card_of(model)
    for name, opposite in (("left", "right"), ("up", "down")):
        forth, back = (
            accuracy(model, card, source, name, name, flip) - accuracy(model, card, source, name, opposite, flip)
            for flip in (False, True)
        )
        assert forth - back > 1.0, (name, forth, back)  # 0 if the order is ignored, 2 if it is always used
    single = train(recipe(*plan, "model={name: sparseformer_nano}", "epochs=4"), tmp_path / "image", progress=False)
    assert single.result["final"]["top1"] < 25


@torch.no_grad()
def accuracy(model, card, source: MotionSet, name: str, predicted: str, backwards: bool) -> float:
    """Return how often clips of one class, possibly reversed, are predicted as another."""
    clips = source.clips(np.flatnonzero(source.labels == MOTIONS.index(name)).tolist()).float() / 255
    mean, std = (torch.tensor(values).view(3, 1, 1, 1) for values in (card.preprocess.mean, card.preprocess.std))
    clips = (clips - mean) / std
    logits = model(clips.flip(2) if backwards else clips)
    return float((logits.argmax(1) == MOTIONS.index(predicted)).float().mean())
