"""Complete runs on the CPU: files, resuming, time limit, other models."""

import json
from itertools import count

import pytest
import torch
from safetensors.torch import load_file

from saccade.engine.recipe import RecipeError
from saccade.engine.train import differences, train
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


def test_deterministic_run_restores_torch_settings(finished):
    assert finished.result["recipe"]["trainer"]["deterministic"]
    assert not torch.are_deterministic_algorithms_enabled()


def test_existing_run_is_not_overwritten(finished):
    before = (finished.out / "last.safetensors").stat().st_mtime_ns
    with pytest.raises(RecipeError, match=r"already contains a run\. Continue it with --resume"):
        train(recipe("ema.decay=0.5", "augment.mixup=0.8"), finished.out, progress=False)
    with pytest.raises(RecipeError, match="cannot change batch_size: it was 20 and is now 10"):
        train(recipe("batch_size=10"), finished.out, resume=True, progress=False)
    assert (finished.out / "last.safetensors").stat().st_mtime_ns == before


def test_resuming_finished_run_evaluates_again(finished):
    before = load_file(finished.out / "last.safetensors")
    again = train(recipe("ema.decay=0.5", "augment.mixup=0.8"), finished.out, resume=True, progress=False)
    assert again.result["final"] == finished.result["final"]
    after = load_file(finished.out / "last.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


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


@pytest.mark.slow
def test_compiled_model_takes_same_steps(tmp_path):
    plain, compiled = (
        train(recipe(f"trainer.compile={switch}", "augment.mixup=0.8"), tmp_path / switch, progress=False)
        for switch in ("false", "true")
    )
    a, b = load_file(plain.out / "last.safetensors"), load_file(compiled.out / "last.safetensors")
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=2e-4, rtol=1e-3)
