"""Complete runs on the CPU: files, resuming, time limit, other models."""

import json
from itertools import count

import pytest
import torch
from safetensors.torch import load_file

from saccade.engine.clock import Clock
from saccade.engine.recipe import RecipeError
from saccade.engine.tasks.classify import ClassificationModule
from saccade.engine.train import assemble, differences, train, warn_if_slow
from saccade.weights.read import read_metadata
from tests.engine.runs import recipe, rows


def test_run_writes_all_files(finished):
    out = finished.out
    names = {"best.safetensors", "last.ckpt", "last.safetensors", "metrics.csv", "recipe.yaml", "report.html",
             "result.json", "tensorboard"}  # fmt: skip
    assert {path.name for path in out.iterdir()} == names
    assert any((out / "tensorboard").iterdir())
    result = json.loads((out / "result.json").read_text())
    assert result == finished.result
    assert result["machine"]["torch"] == torch.__version__
    assert result["recipe"]["ema"]["decay"] == 0.5
    assert (result["steps"], result["epochs"], result["train_images"], result["val_images"]) == (6, 2, 60, 15)


def test_run_prints_its_folder_and_metrics(finished):
    text = repr(finished)
    assert text.startswith(f"Run({finished.out}: ")
    assert f"top1={finished.metrics['top1']:.4g}" in text
    assert len(text) < 300  # not all of result.json


def test_deterministic_run_restores_torch_settings(finished):
    assert finished.result["recipe"]["trainer"]["deterministic"]
    assert not torch.are_deterministic_algorithms_enabled()


def test_existing_run_is_not_overwritten(finished):
    before = (finished.out / "last.safetensors").stat().st_mtime_ns
    with pytest.raises(ValueError, match=r"already contains a run\. Continue it with --resume"):
        train(recipe("ema.decay=0.5", "augment.mixup=0.8"), finished.out, progress=False)
    with pytest.raises(ValueError, match="cannot change batch_size: it was 20 and is now 10"):
        train(recipe("batch_size=10"), finished.out, resume=True, progress=False)
    assert (finished.out / "last.safetensors").stat().st_mtime_ns == before


def test_resuming_finished_run_evaluates_again(finished):
    before = load_file(finished.out / "last.safetensors")
    again = train(recipe("ema.decay=0.5", "augment.mixup=0.8"), finished.out, resume=True, progress=False)
    assert again.result["final"] == finished.result["final"]
    after = load_file(finished.out / "last.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_finished_run_is_extended(tmp_path):
    """Three epochs more: the first rows of the log stay, and the schedule continues as that of a longer run."""
    train(recipe("epochs=1"), tmp_path, progress=False)
    before = rows(tmp_path)
    run = train(out=tmp_path, resume=True, epochs=4, progress=False)
    assert (run.result["steps"], run.result["epochs"]) == (12, 4)
    assert rows(tmp_path)[: len(before)] == before
    train(recipe("epochs=4"), tmp_path / "direct", progress=False)
    rates, direct = ([row["lr"] for row in rows(out) if row["lr"]] for out in (tmp_path, tmp_path / "direct"))
    assert rates[3:] == direct[3:]
    with pytest.raises(ValueError, match="cannot change epochs: it was 4 and is now 3"):
        train(recipe("epochs=3"), tmp_path, resume=True, progress=False)
    (tmp_path / "result.json").unlink()  # as in a run that was interrupted
    with pytest.raises(ValueError, match="Only a finished run can be extended"):
        train(recipe("epochs=5"), tmp_path, resume=True, progress=False)


def test_early_stop_ends_run_and_stays_ended(tmp_path, monkeypatch):
    """Validation top-1 by epoch: 1, 2, 2, 1, …; the third is the best by its loss; two more validations follow."""
    values = iter([(1.0, 9.0), (2.0, 5.0), (2.0, 4.0), (1.0, 3.0), (2.0, 4.5), (9.0, 1.0)])

    def metrics(self):
        return dict(zip(("top1", "loss"), next(values), strict=True)) | {"top5": 0.0, "calibration": 0.0}

    monkeypatch.setattr(ClassificationModule, "compute_metrics", metrics)
    changes = ["epochs=20", "trainer.early_stop=2"]
    run = train(recipe(*changes), tmp_path, progress=False)
    assert (run.result["steps"], run.result["best"]["step"]) == (15, 9)
    assert train(recipe(*changes), tmp_path, resume=True, progress=False).result["steps"] == 15


@pytest.mark.parametrize(
    ("second", "best"),
    [((50.0, 2.0), 6), ((50.0, 3.0), 3), ((50.0, 2.5), 6), ((49.0, 1.0), 3), ((51.0, 9.0), 6)],
)
def test_best_breaks_ties_by_loss_then_by_the_later(second, best, tmp_path, monkeypatch):
    values = iter([(50.0, 2.5), second])

    def metrics(self):
        return dict(zip(("top1", "loss"), next(values), strict=True)) | {"top5": 0.0, "calibration": 0.0}

    monkeypatch.setattr(ClassificationModule, "compute_metrics", metrics)
    run = train(recipe(), tmp_path, progress=False)
    assert run.result["best"]["step"] == best
    assert read_metadata(run.weights)["saccade.step"] == str(best)


def test_report_shows_the_weights_that_predict_opens(tmp_path, monkeypatch):
    """The second validation is made worse, so that best.safetensors is from the first epoch."""
    original = ClassificationModule.compute_metrics

    def worse(self):
        return original(self) | ({"top1": -1.0} if self.clock.steps > 3 else {})

    with monkeypatch.context() as patched:
        patched.setattr(ClassificationModule, "compute_metrics", worse)
        run = train(recipe("optimizer.lr=0.05"), tmp_path, progress=False)
    assert run.result["best"]["step"] == 3
    assert run.metrics["loss"] == pytest.approx(run.result["best"]["loss"], rel=1e-4)
    assert all(torch.equal(value, load_file(run.weights)[name]) for name, value in run.model.state_dict().items())


def test_frozen_backbone_keeps_its_weights(tmp_path):
    initial = {name: value.clone() for name, value in assemble(recipe()).model.state_dict().items()}
    train(recipe("model.freeze=true", "optimizer.lr=0.1"), tmp_path, progress=False)
    trained = load_file(tmp_path / "last.safetensors")
    assert {name for name in trained if not torch.equal(trained[name], initial[name])} == {
        "head.fc.weight",
        "head.fc.bias",
    }


def test_long_run_is_announced(tmp_path, monkeypatch, caplog):
    """One forward pass takes 5 s, as measured by the fake timer: 60 images x 2 epochs x 3 passes are half an hour."""

    monkeypatch.setattr("saccade.engine.train.best_time", lambda step, device, repeats: step() is not None and 5.0)
    for epochs, hours in ((2, None), (10, "about 2 hours on this CPU: 10 epochs of 60 images")):
        plan = recipe(f"epochs={epochs}")
        model, _, _, preprocess = assemble(plan)
        warn_if_slow(model, preprocess, plan, Clock(3 * epochs, now=0.0), "cpu")
        assert (hours in caplog.text) if hours else not caplog.text
    assert model.training


def test_class_weights_and_focal_loss_change_the_loss(tmp_path):
    """Of the first step, before any weight has changed."""
    losses = [
        float(rows(train(recipe("epochs=1", *changes), tmp_path / str(i), progress=False).out)[0]["train_loss"])
        for i, changes in enumerate(
            ([], ["regularize.focal_gamma=2"], ["regularize.class_weights=balanced"],
             ["regularize.class_weights=[1, 2, 3, 4, 5, 6, 7, 8, 9, 9]"])
        )
    ]  # fmt: skip
    assert losses[1] < 0.9 * losses[0]  # (1 - p) ** 2 with p near 0.1
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)  # the scenes are balanced
    assert losses[3] != losses[0]
    with pytest.raises(RecipeError, match=r"expected 10 values in regularize\.class_weights, got 2"):
        train(recipe("regularize.class_weights=[1, 2]"), tmp_path / "x", progress=False)


def test_synchronised_batch_norm_on_cpu_is_refused(tmp_path):
    with pytest.raises(ValueError, match="sync_batchnorm needs GPUs"):
        train(recipe("trainer.sync_batchnorm=true", "trainer.devices=2"), tmp_path, progress=False)


def test_differences_descend_into_groups_but_not_into_kwargs():
    before = {"epochs": 1, "model": {"name": "a", "kwargs": {"depth": 1}}}
    now = {"epochs": 1, "model": {"name": "b", "kwargs": {"depth": 2}}}
    assert differences(before, now) == [("model.name", "a", "b"), ("model.kwargs", {"depth": 1}, {"depth": 2})]


def test_time_limit_ends_run_with_decayed_rate_and_validation(tmp_path, monkeypatch):
    """The clock reads a fake timer that advances 0.05 s with every reading."""

    class Timer:
        ticks = count()

        def monotonic(self) -> float:
            return 0.05 * next(self.ticks)

    for module in ("clock", "train"):
        monkeypatch.setattr(f"saccade.engine.{module}.time", Timer())
    plan = recipe("epochs=100000", "trainer.max_minutes=0.2", "trainer.val_every=1000", "schedule.min_lr=0")
    result = train(plan, tmp_path, progress=False).result
    logged = rows(tmp_path)
    rates = [float(row["lr"]) for row in logged if row["lr"]]
    assert result["steps"] == len(rates) < 300_000
    assert [row["step"] for row in logged if row["val_top1"]] == [str(result["steps"])]
    assert rates[-1] < 0.2 * max(rates)


def test_timm_model_trains_in_mixed_precision(tmp_path):
    plan = recipe("model={name: resnet10t}", "epochs=1", "trainer.precision=bf16-mixed")
    assert train(plan, tmp_path, progress=False).result["model"] == "resnet10t"


SGD = "optimizer={name: sgd, lr: 0.01}"  # AdamW divides tiny gradients by their size, which magnifies rounding


@pytest.mark.slow
def test_compiled_model_takes_same_steps(tmp_path):
    plain, compiled = (
        train(recipe(f"trainer.compile={switch}", "augment.mixup=0.8", SGD), tmp_path / switch, progress=False)
        for switch in ("false", "true")
    )
    a, b = load_file(plain.out / "last.safetensors"), load_file(compiled.out / "last.safetensors")
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=2e-5, rtol=1e-4)
