"""Classification: loss, metrics, checkpoints of classifiers."""

import pytest
import timm
import torch

import saccade
from saccade.models.card import Card, Preprocess, save_model
from saccade.tasks.classification import (
    accuracy_metrics,
    build_classifier,
    freeze_batch_norms,
    per_class_accuracy,
)
from saccade.tasks.load import card_of, load
from saccade.tasks.losses import class_loss

SMALL = {"dims": (8, 16, 16, 16), "depths": (1, 1, 1, 1), "heads": (1, 1, 1, 1), "projection": 16}


def test_loss_smooths_labels_but_not_mixed_targets():
    logits, labels = torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 0])
    smooth = torch.eye(4)[labels] * 0.9 + 0.1 / 4
    by_hand = -(smooth * logits.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(class_loss(logits, labels, label_smoothing=0.1), by_hand)
    torch.testing.assert_close(class_loss(logits, smooth, label_smoothing=0.1), by_hand)


def test_saved_model_is_opened_with_its_card(tmp_path):
    model = build_classifier("svit_nano", 3, **SMALL).eval()
    card = Card("svit_nano", 3, SMALL | {"dims": [8, 16, 16, 16]}, ["a", "b", "c"], Preprocess(48, crop_pct=0.8))
    save_model(model, tmp_path / "best.safetensors", card, step="12")
    opened = load(tmp_path)  # the folder of a run: its best weights
    card = card_of(opened)
    assert (card.name, card.classes, card.preprocess.size, card.preprocess.crop_pct) == (
        "svit_nano", ["a", "b", "c"], 48, 0.8)  # fmt: skip
    images = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(opened(images), model(images))
    with pytest.raises(ValueError, match=r"expected best\.safetensors or last\.safetensors"):
        load(tmp_path.parent)
    (tmp_path / "broken.safetensors").write_bytes(b"abc")
    with pytest.raises(ValueError, match="damaged"):
        load(tmp_path / "broken.safetensors")


def test_classifier_of_another_size_is_replaced(tmp_path):
    torch.manual_seed(0)
    model = build_classifier("svit_nano", 7, **SMALL)
    saccade.save_checkpoint(model, tmp_path / "w.safetensors")
    tuned = build_classifier("svit_nano", 3, str(tmp_path / "w.safetensors"), **SMALL)
    same = build_classifier("svit_nano", 7, str(tmp_path / "w.safetensors"), **SMALL)
    assert tuned.head.fc.weight.shape[0] == 3
    torch.testing.assert_close(tuned.stem[0].conv.weight, model.stem[0].conv.weight)
    torch.testing.assert_close(same.head.fc.weight, model.head.fc.weight)
    with pytest.raises(ValueError, match="Use the same size and options"):
        build_classifier("svit_nano", 3, str(tmp_path / "w.safetensors"), **(SMALL | {"projection": 24}))


@pytest.mark.shows("SVIT-44")
def test_frozen_batch_norms_do_not_update():
    model = timm.create_model("resnet10t", num_classes=2).train()
    before = {name: value.clone() for name, value in model.named_buffers()}
    freeze_batch_norms(model)
    model(torch.randn(4, 3, 32, 32))
    assert len(before) == 42  # 14 norms, three buffers each
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_metrics_match_counts():
    logits = torch.tensor([[4.0, 1, 0, 0, 0, 0], [3, 2, 1, 0, 0, -1], [0, 0, 0, 0, 0.1, 5], [1, 0, 0, 0, 0, -9]])
    labels = torch.tensor([0, 1, 5, 5])
    metrics = accuracy_metrics(6)
    metrics.update(logits, labels)
    values = metrics.compute()
    assert float(values["top1"]) == pytest.approx(0.5)
    assert float(values["top5"]) == pytest.approx(0.75)  # the last image ranks its class sixth
    assert per_class_accuracy(labels, logits.argmax(1), 6) == [1.0, 0.0, None, None, None, 0.5]


def test_calibration_error_of_an_overconfident_model():
    """Confidence 0.9, accuracy 0.5: error 0.4."""
    logits = torch.tensor([[0.9, 0.1]]).log().expand(100, 2)
    metrics = accuracy_metrics(2)
    metrics.update(logits, torch.arange(100) % 2)
    assert float(metrics.compute()["calibration"]) == pytest.approx(0.4, abs=1e-4)
