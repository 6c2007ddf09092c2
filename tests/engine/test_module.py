"""The LightningModule: EMA, backward thread, non-finite losses, gradient accumulation."""

import threading
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from saccade.engine.module import NonFiniteLoss, TrainingModule, WeightAverage
from saccade.engine.tasks.classify import ClassificationModule
from saccade.engine.train import train
from tests.engine.runs import recipe


def test_saved_weights_are_the_average(finished):
    saved = load_file(finished.out / "last.safetensors")
    state = torch.load(finished.out / "last.ckpt", weights_only=True)["state_dict"]
    average = {k.removeprefix("ema.module."): v for k, v in state.items() if k.startswith("ema.module.")}
    plain = {k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}
    assert all(torch.equal(saved[name], average[name]) for name in saved)
    assert any(not torch.equal(saved[name], plain[name]) for name in saved)


def test_average_follows_formula_and_copies_counters():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    average = WeightAverage(model, decay=0.75)
    before = {name: value.clone() for name, value in average.module.state_dict().items()}
    for value in model.state_dict().values():
        value.add_(1)
    average.update(model)
    for name, value in average.module.state_dict().items():
        now = model.state_dict()[name]
        torch.testing.assert_close(value, 0.75 * before[name] + 0.25 * now if value.is_floating_point() else now)


def test_non_finite_loss_names_step_images_and_checkpoint(tmp_path, monkeypatch):
    original = ClassificationModule.loss

    def broken(self, logits, targets, images):
        loss = original(self, logits, targets, images)
        return loss * float("nan") if self.clock.steps == 4 else loss

    monkeypatch.setattr(ClassificationModule, "loss", broken)
    with pytest.raises(NonFiniteLoss, match=r"the loss is nan at step 4, on scenes .*scene \d+.* 12 more.*last\.ckpt"):
        train(recipe(), tmp_path, progress=False)
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert checkpoint["saccade"]["steps"] == 3, "the checkpoint of the validation before"
    assert all(torch.isfinite(value).all() for value in checkpoint["state_dict"].values())


def test_non_finite_weights_are_not_saved(tmp_path, monkeypatch):
    """A step can write infinities although its own loss was finite."""
    original = TrainingModule.optimizer_step

    def broken(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if self.clock.steps == 6:  # the last step: no further loss is computed
            next(self.model.parameters()).data.fill_(float("inf"))

    monkeypatch.setattr(TrainingModule, "optimizer_step", broken)
    with pytest.raises(NonFiniteLoss, match="not finite after step 6"):
        train(recipe(), tmp_path, progress=False)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["saccade"]["steps"] == 3


def test_backward_runs_on_calling_thread(tmp_path, monkeypatch):
    """Autograd's CUDA worker thread costs an eager step up to a third of its time."""
    original, calls = ClassificationModule.loss, []

    def with_hook(self, logits, targets, images):
        logits.register_hook(lambda g: calls.append((torch._C._is_multithreading_enabled(), threading.get_ident())))
        return original(self, logits, targets, images)

    monkeypatch.setattr(ClassificationModule, "loss", with_hook)
    train(recipe(), tmp_path, progress=False)
    assert calls == [(False, threading.get_ident())] * 6
    assert torch._C._is_multithreading_enabled()


def test_gradient_accumulation_matches_full_batch(tmp_path):
    """With frozen batch norms, two micro-batches give the step of the full batch."""
    common = ["regularize.freeze_norm=true", "augment.crop=none", "augment.flip=0", "optimizer.name=sgd"]
    full, accumulated = (
        train(recipe(f"trainer.accumulate={parts}", *common), tmp_path / str(parts), progress=False) for parts in (1, 2)
    )
    a, b = load_file(full.out / "last.safetensors"), load_file(accumulated.out / "last.safetensors")
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-6, rtol=1e-4)


@pytest.mark.shows("SF-12")
def test_loss_scale_reaches_the_model_before_every_loss(tmp_path, monkeypatch):
    """A GradScaler's scale, which changes during a run, scales the bound of SparseFormer's gradients."""
    original, scales = ClassificationModule.loss, []

    def with_scaler(self):
        steps = self.clock
        self.trainer.precision_plugin.scaler = SimpleNamespace(get_scale=lambda: 512.0 + steps.steps)

    def record_scale(self, logits, targets, images):
        scales.append(float(self.model.focus.blocks[0].tokenizer.loss_scale))
        return original(self, logits, targets, images)

    monkeypatch.setattr(ClassificationModule, "on_train_epoch_start", with_scaler)
    monkeypatch.setattr(ClassificationModule, "loss", record_scale)
    train(recipe("model.name=sparseformer_nano", "model.kwargs={depth: 1, repeats: 1}"), tmp_path, progress=False)
    assert scales == [512.0 + step for step in range(6)]
