"""Whole runs on the CPU: they learn, tell, stop and go on."""

import json
import logging
import re
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from saccade.engine.classify import Classify
from saccade.engine.evaluate import evaluate_checkpoint
from saccade.engine.module import NonFiniteLoss, Training
from saccade.engine.recipe import RecipeError
from saccade.engine.train import train
from tests.engine.runs import recipe, rows


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run with a bit of everything, shared by the tests that look at what it left."""
    out = tmp_path_factory.mktemp("run")
    return train(recipe("ema.decay=0.5", "augment.mixup=0.8"), out, command="saccade train …", progress=False)


def test_svit_nano_learns_on_a_cpu(tmp_path):
    """Chance is 10 %, a linear model reaches 14 %; two cores need well under two minutes for this."""
    plan = recipe("model={name: svit_nano}", "data.scenes=1280", "batch_size=32", "epochs=6", "trainer.log_every=20",
                  "augment.crop=none", "schedule.warmup_epochs=0.5")  # fmt: skip
    result = train(plan, tmp_path, progress=False).result
    logged = rows(tmp_path)
    losses = [float(row["train_loss"]) for row in logged if row["train_loss"]]
    assert losses[0] == pytest.approx(np.log(10), abs=0.35)
    assert losses[-1] < 1.5
    assert result["final"]["top1"] > 40


def test_a_run_leaves_everything_behind(finished):
    out = finished.out
    names = {"best.safetensors", "last.ckpt", "last.safetensors", "metrics.csv", "recipe.yaml", "report.html",
             "result.json", "tensorboard"}  # fmt: skip
    assert {path.name for path in out.iterdir()} == names
    assert any((out / "tensorboard").iterdir())
    result = json.loads((out / "result.json").read_text())
    assert result == finished.result
    assert result["machine"]["torch"] == torch.__version__
    assert result["recipe"]["ema"]["decay"] == 0.5
    assert (result["updates"], result["epochs"], result["train_images"], result["val_images"]) == (6, 2, 60, 15)


def test_a_run_that_must_repeat_leaves_the_process_as_it_was(finished):
    assert finished.result["recipe"]["trainer"]["deterministic"]
    assert not torch.are_deterministic_algorithms_enabled()


def test_metrics_are_logged_side_by_side(finished):
    """Training and validation top-1 (VT-61), loss, rate and throughput, with their update."""
    logged = rows(finished.out)
    assert [int(row["step"]) for row in logged if row["train_top1"]] == [1, 2, 3, 4, 5, 6]
    assert [int(row["step"]) for row in logged if row["val_top1"]] == [3, 6]
    assert all(row["lr"] for row in logged if row["train_loss"])


def test_the_kept_weights_are_the_average(finished):
    kept, state = (
        load_file(finished.out / "last.safetensors"),
        torch.load(finished.out / "last.ckpt", weights_only=True),
    )
    average = {k.removeprefix("ema.module."): v for k, v in state["state_dict"].items() if k.startswith("ema.module.")}
    plain = {k.removeprefix("model."): v for k, v in state["state_dict"].items() if k.startswith("model.")}
    assert all(torch.equal(kept[name], average[name]) for name in kept)
    assert any(not torch.equal(kept[name], plain[name]) for name in kept)


def test_evaluating_the_file_gives_the_number_of_the_run(finished):
    evaluation, card, source = evaluate_checkpoint(
        finished.out / "last.safetensors", "scenes", size=32, workers=0, scenes=60
    )
    for name in ("count", "top1", "top5"):
        assert getattr(evaluation, name) == pytest.approx(finished.result["final"][name], abs=1e-3)
    assert evaluation.loss == pytest.approx(finished.result["final"]["loss"], abs=1e-3)
    assert card.classes == source.classes
    assert evaluation.confusion.sum() == 15
    assert int(evaluation.confusion.diagonal().sum()) == round(0.15 * evaluation.top1)


def test_the_report_is_one_file_that_needs_nothing_else(finished):
    page = (finished.out / "report.html").read_text()
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "http" not in page.replace("http-equiv", "")
    for word in ("Curves", "Confusion", "Accuracy of each class", "most wrong about", "Environment", "Recipe"):
        assert word in page
    assert page.count("<polyline") >= 5
    assert page.count("data:image/jpeg") >= 1
    assert "drop_path: 0.0" in page
    assert torch.__version__ in page
    assert f"{finished.result['final']['top1']:.2f} %" in page


def test_a_finished_folder_is_not_overwritten(finished):
    before = (finished.out / "last.safetensors").stat().st_mtime_ns
    with pytest.raises(RecipeError, match="--resume"):
        train(recipe("ema.decay=0.5", "augment.mixup=0.8"), finished.out, progress=False)
    with pytest.raises(RecipeError, match="batch_size was 20 and is now 10"):
        train(recipe("batch_size=10"), finished.out, resume=True, progress=False)
    assert (finished.out / "last.safetensors").stat().st_mtime_ns == before


def test_resuming_a_finished_run_only_reports(finished, tmp_path):
    before = load_file(finished.out / "last.safetensors")
    again = train(recipe("ema.decay=0.5", "augment.mixup=0.8"), finished.out, resume=True, progress=False)
    assert again.result["final"] == finished.result["final"]
    after = load_file(finished.out / "last.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_loss_that_is_not_a_number_stops_with_step_names_and_state(tmp_path, monkeypatch):
    ordinary = Classify.loss

    def broken(self, logits, targets, images):
        loss = ordinary(self, logits, targets, images)
        return loss * float("nan") if self.clock.steps == 4 else loss

    monkeypatch.setattr(Classify, "loss", broken)
    with pytest.raises(NonFiniteLoss, match=r"nan at update 4\. Its pictures: scenes .*scene \d+.*last\.ckpt"):
        train(recipe(), tmp_path, progress=False)
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert state["saccade"]["steps"] == 3, "the last good state is the one before"
    assert all(torch.isfinite(value).all() for value in state["state_dict"].values())


def test_ruined_weights_are_not_saved_over_good_ones(tmp_path, monkeypatch):
    """A step can write infinities although its own loss was finite; the next save must notice."""
    ordinary = Training.optimizer_step

    def ruining(self, *args, **kwargs):
        ordinary(self, *args, **kwargs)
        if self.clock.steps == 6:  # the last update of the second epoch: no further loss will tell
            next(self.model.parameters()).data.fill_(float("inf"))

    monkeypatch.setattr(Training, "optimizer_step", ruining)
    with pytest.raises(NonFiniteLoss, match="no longer finite after update 6"):
        train(recipe(), tmp_path, progress=False)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["saccade"]["steps"] == 3


def test_the_way_back_is_gone_by_the_same_thread(tmp_path, monkeypatch):
    """Autograd's own thread for a GPU costs an eager step up to a third of its time (docs/dev/performance.md)."""
    ordinary, seen = Classify.loss, []

    def heard(self, logits, targets, images):
        logits.register_hook(lambda g: seen.append((torch._C._is_multithreading_enabled(), threading.get_ident())))
        return ordinary(self, logits, targets, images)

    monkeypatch.setattr(Classify, "loss", heard)
    train(recipe(), tmp_path, progress=False)
    assert seen == [(False, threading.get_ident())] * 6
    assert torch._C._is_multithreading_enabled()


@pytest.fixture
def photos(tmp_path):
    """Two classes of noise, large enough to be read file by file; three files are damaged."""
    noise = np.random.default_rng(0)
    for name in ("dark", "light"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(20):
            low = 0 if name == "dark" else 150
            picture = noise.integers(low, low + 100, (110, 120, 3), np.uint8)
            Image.fromarray(picture).save(tmp_path / "data" / name / f"{i}.jpg")
    for name in ("dark/3.jpg", "dark/7.jpg", "light/0.jpg"):
        whole = (tmp_path / "data" / name).read_bytes()
        (tmp_path / "data" / name).write_bytes(whole[:200])
    return tmp_path / "data"


@pytest.mark.parametrize("cache", ["false", "true"])
def test_unreadable_pictures_are_skipped_and_counted(photos, tmp_path, cache, caplog):
    plan = recipe(f"data.path={photos}", "batch_size=8", f"data.cache={cache}", "augment.auto=rand-m9-n2", "epochs=3")
    with caplog.at_level(logging.WARNING):
        result = train(plan, tmp_path / "run", progress=False).result
    assert result["unreadable"] == 3
    page = (tmp_path / "run/report.html").read_text()
    assert all(name in page for name in ("dark/3.jpg", "dark/7.jpg", "light/0.jpg"))
    for name in ("dark/3.jpg", "dark/7.jpg", "light/0.jpg"):
        assert sum(name in message for message in caplog.messages) == 1, "told once, by its path"
    assert result["final"]["top1"] >= 50


def test_too_many_unreadable_pictures_stop_the_run(photos, tmp_path):
    plan = recipe(f"data.path={photos}", "batch_size=8", "data.max_bad=2")
    with pytest.raises(ValueError, match=r"3 pictures cannot be read, more than data\.max_bad=2"):
        train(plan, tmp_path / "run", progress=False)


def test_a_time_limit_ends_the_run_properly(tmp_path):
    plan = recipe("epochs=100000", "trainer.max_minutes=0.07", "trainer.val_every=1000", "schedule.min_lr=0")
    result = train(plan, tmp_path, progress=False).result
    logged = rows(tmp_path)
    assert result["updates"] > 15
    assert logged[-1]["val_top1"], "validated at the end"
    rates = [float(row["lr"]) for row in logged if row["lr"]]
    assert min(rates[-3:]) < 0.2 * max(rates), "the schedule came down in time"


def test_distillation_pulls_towards_the_teacher(tmp_path, finished):
    """With all weight on the teacher, labels do not matter: the student's answers approach the teacher's."""
    teacher = f"distill.teacher={finished.out}/last.safetensors"
    common = ["augment.crop=none", "augment.flip=0", "epochs=8", "optimizer.lr=3e-3"]
    first = train(recipe(teacher, "distill.weight=1.0", *common), tmp_path / "a", progress=False)
    losses = [float(row["train_loss"]) for row in rows(first.out) if row["train_loss"]]
    assert losses[-1] < 0.5 * losses[0]
    assert losses[-1] < 0.2, "a divergence goes to zero, a cross-entropy with ten classes would not"
    state = torch.load(first.out / "last.ckpt", weights_only=True)
    assert not any("teacher" in name for name in state["state_dict"])


def test_fine_tuning_with_frozen_norms_and_another_classifier(finished, tmp_path):
    made = tmp_path / "data"
    for number, name in enumerate(("a", "b", "c")):
        (made / name).mkdir(parents=True)
        for i in range(8):
            Image.new("RGB", (32, 32), (40 * number, 9 * i, 90)).save(made / name / f"{i}.png")
    plan = recipe(f"data.path={made}", f"model.checkpoint={finished.out}/last.safetensors", "batch_size=8", "epochs=1",
                  "regularize.freeze_norm=true")  # fmt: skip
    tuned = train(plan, tmp_path / "run", progress=False)
    before, after = load_file(finished.out / "last.safetensors"), load_file(tuned.out / "last.safetensors")
    assert after["head.fc.weight"].shape[0] == 3
    assert all(torch.equal(before[name], after[name]) for name in before if "running" in name)
    assert any(not torch.equal(before[name], after[name]) for name in before if name.endswith("conv.weight"))


def test_timm_s_models_train_under_the_same_recipe(tmp_path):
    plan = recipe("model={name: resnet10t}", "epochs=1", "trainer.precision=bf16-mixed")
    assert train(plan, tmp_path, progress=False).result["model"] == "resnet10t"


@pytest.mark.slow
def test_a_compiled_model_takes_the_same_steps(tmp_path):
    plain, compiled = (
        train(recipe(f"trainer.compile={switch}", "augment.mixup=0.8"), tmp_path / switch, progress=False)
        for switch in ("false", "true")
    )
    a, b = load_file(plain.out / "last.safetensors"), load_file(compiled.out / "last.safetensors")
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=2e-4, rtol=1e-3)


def test_gradient_accumulation_takes_the_steps_of_the_whole_batch(tmp_path):
    """Without batch norm's statistics in the way (frozen), two halves are the whole."""
    common = ["regularize.freeze_norm=true", "augment.crop=none", "augment.flip=0", "optimizer.name=sgd"]
    whole, halves = (
        train(recipe(f"trainer.accumulate={parts}", *common), tmp_path / str(parts), progress=False) for parts in (1, 2)
    )
    a, b = load_file(whole.out / "last.safetensors"), load_file(halves.out / "last.safetensors")
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-6, rtol=1e-4)
