"""Losses against their formulas, teachers in their own colours, classifiers that change size."""

from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import saccade
from saccade.models.card import Card, Preprocess, open_model, preprocess_of, save_model
from saccade.tasks.classification import (
    accuracy_metrics,
    build_classifier,
    classification_loss,
    freeze_batch_norms,
    per_class_accuracy,
)
from saccade.tasks.distillation import Teacher, distillation_loss, load_teacher

SMALL = {"dims": (8, 16, 16, 16), "depths": (1, 1, 1, 1), "heads": (1, 1, 1, 1), "projection": 16}


def test_cross_entropy_with_smoothing_and_with_mixed_targets():
    logits, labels = torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 0])
    smooth = torch.eye(4)[labels] * 0.9 + 0.1 / 4
    by_hand = -(smooth * logits.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(classification_loss(logits, labels, 0.1), by_hand)
    torch.testing.assert_close(classification_loss(logits, smooth, 0.1), by_hand)  # mixed targets carry their smoothing


def test_distillation_is_the_divergence_from_the_teacher():
    student, teacher = torch.randn(6, 5), torch.randn(6, 5)
    soft = (teacher / 3).softmax(1)
    by_hand = (soft * (soft.log() - (student / 3).log_softmax(1))).sum(1).mean() * 9
    torch.testing.assert_close(distillation_loss(student, teacher, temperature=3.0), by_hand)
    assert float(distillation_loss(teacher, teacher)) == pytest.approx(0, abs=1e-6)
    hard = torch.nn.functional.cross_entropy(student, teacher.argmax(1))
    torch.testing.assert_close(distillation_loss(student, teacher, kind="hard"), hard)


def test_a_teacher_gets_pictures_in_its_own_colours():
    seen: list[torch.Tensor] = []

    class Listener(nn.Module):
        num_classes = 3

        def __init__(self):
            super().__init__()
            self.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "input_size": (3, 32, 32)}

        def forward(self, images):
            seen.append(images)
            return images.mean((2, 3))

    student = Preprocess(32, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    pixels = torch.rand(2, 3, 8, 8)
    mean, std = torch.tensor(student.mean)[:, None, None], torch.tensor(student.std)[:, None, None]
    teacher = Teacher(Listener(), 3, student).train()
    teacher((pixels - mean) / std)
    torch.testing.assert_close(seen[0], (pixels - 0.5) / 0.5)
    assert not teacher.model.training
    Teacher(Listener(), 3, student, size=48)(torch.rand(2, 3, 32, 32))
    assert seen[1].shape == (2, 3, 48, 48), "a teacher may look more closely than its student"


def test_a_teacher_for_other_classes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the teacher has 7 classes, the data has 10"):
        load_teacher("resnet10t", 10, Preprocess(), pretrained=False, num_classes=7)
    with pytest.raises(ValueError, match="as teacher, got 'nobody'"):
        load_teacher("nobody", 10, Preprocess())


def test_any_saccade_checkpoint_can_teach(tmp_path):
    model = build_classifier("svit_nano", 3, **SMALL).eval()
    card = Card("svit_nano", 3, SMALL, ["a", "b", "c"], Preprocess(32))
    save_model(model, tmp_path / "t.safetensors", card)
    teacher = load_teacher(str(tmp_path / "t.safetensors"), 3, preprocess_of(model))
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(teacher(images), model(images), atol=1e-5, rtol=1e-5)


def test_several_teachers_teach_the_mean_of_their_probabilities(tmp_path):
    files, models = [], []
    for seed, size in ((0, 32), (1, 48)):
        torch.manual_seed(seed)
        models.append(build_classifier("svit_nano", 3, **SMALL).eval())
        files.append(str(tmp_path / f"{seed},{size}.safetensors"))  # a comma in a name is no other teacher
        save_model(models[-1], files[-1], Card("svit_nano", 3, SMALL, ["a", "b", "c"], Preprocess(size)))
    seen, images = preprocess_of(models[0])._replace(size=32), torch.randn(2, 3, 32, 32)
    assert isinstance(load_teacher(files[0], 3, seen), Teacher)
    plain = [str(tmp_path / "first.safetensors"), str(tmp_path / "second.safetensors")]
    for file, name in zip(files, plain, strict=True):
        Path(file).rename(name)
    for size, second in ((None, images), (0, F.interpolate(images, (48, 48), mode="bicubic", antialias=True))):
        teachers = load_teacher(", ".join(plain), 3, seen, size).train()
        expected = (models[0](images).softmax(1) + models[1](second).softmax(1)) / 2
        torch.testing.assert_close(teachers(images).exp(), expected, atol=1e-5, rtol=1e-5)
        assert not any(module.training for module in teachers.teachers[0].model.modules())
    with pytest.raises(ValueError, match="as teacher, got 'nobody'"):
        load_teacher(f"{plain[0]},nobody", 3, seen)


def test_a_file_brings_its_model_back(tmp_path):
    model = build_classifier("svit_nano", 3, **SMALL).eval()
    card = Card("svit_nano", 3, SMALL | {"dims": [8, 16, 16, 16]}, ["a", "b", "c"], Preprocess(48, crop_pct=0.8))
    save_model(model, tmp_path / "best.safetensors", card, step="12")
    found, about = open_model(tmp_path)  # a run's folder stands for its best weights
    assert (about.name, about.classes, about.preprocess.size, about.preprocess.crop_pct) == (
        "svit_nano", ["a", "b", "c"], 48, 0.8)  # fmt: skip
    images = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(found(images), model(images))
    with pytest.raises(ValueError, match="neither best"):
        open_model(tmp_path.parent)
    (tmp_path / "broken.safetensors").write_bytes(b"abc")
    with pytest.raises(ValueError, match="damaged"):
        open_model(tmp_path / "broken.safetensors")


def test_fine_tuning_replaces_a_classifier_of_another_size(tmp_path):
    torch.manual_seed(0)
    model = build_classifier("svit_nano", 7, **SMALL)
    saccade.save_checkpoint(model, tmp_path / "w.safetensors")
    tuned = build_classifier("svit_nano", 3, str(tmp_path / "w.safetensors"), **SMALL)
    same = build_classifier("svit_nano", 7, str(tmp_path / "w.safetensors"), **SMALL)
    assert tuned.head.fc.weight.shape[0] == 3
    torch.testing.assert_close(tuned.stem[0].conv.weight, model.stem[0].conv.weight)
    torch.testing.assert_close(same.head.fc.weight, model.head.fc.weight)
    with pytest.raises(ValueError, match="another size"):
        build_classifier("svit_nano", 3, str(tmp_path / "w.safetensors"), **(SMALL | {"projection": 24}))


def test_frozen_norms_keep_their_averages():
    model = timm.create_model("resnet10t", num_classes=2).train()
    before = {name: value.clone() for name, value in model.named_buffers()}
    freeze_batch_norms(model)
    model(torch.randn(4, 3, 32, 32))
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_metrics_against_counting():
    logits = torch.tensor([[4.0, 1, 0, 0, 0, 0], [3, 2, 1, 0, 0, -1], [0, 0, 0, 0, 0.1, 5], [1, 0, 0, 0, 0, -9]])
    labels = torch.tensor([0, 1, 5, 5])
    metrics = accuracy_metrics(6)
    metrics.update(logits, labels)
    found = metrics.compute()
    assert float(found["top1"]) == pytest.approx(0.5)
    assert float(found["top5"]) == pytest.approx(0.75)  # the last one ranks its class sixth
    assert per_class_accuracy(labels, logits.argmax(1), 6) == [1.0, 0.0, None, None, None, 0.5]


def test_calibration_error_of_an_overconfident_model():
    """Always 90 % sure, right half of the time: off by 40 %."""
    sure = torch.tensor([[0.9, 0.1]]).log().expand(100, 2)
    metrics = accuracy_metrics(2)
    metrics.update(sure, torch.arange(100) % 2)
    assert float(metrics.compute()["calibration"]) == pytest.approx(0.4, abs=1e-4)
