"""Segmentation from the command line: train, eval, predict, convert."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import saccade
from saccade.data.synthetic.photos import photo_paths
from tests.engine.tasks.test_segment import SMALL
from tests.tasks.test_segmentation_checkpoints import official_file
from tests.walk.test_cli import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Train for one epoch with `saccade train`."""
    out = tmp_path_factory.mktemp("walk") / "run"
    from saccade.cli import main

    settings = [word for change in (*SMALL[2:], "epochs=1", "data.scenes=20") for word in ("--set", change)]
    model = ["--model", "svit_nano", "--head", "fpn", "--set", "model.head_kwargs={dim: 16, branch_dim: 16}"]
    assert main(["train", *model, *settings, "--out", str(out), "--quiet", "--device", "cpu"]) == 0
    return out


def test_eval_prints_miou_and_classes(capsys, folder, tmp_path):
    command = ["eval", str(folder), "--data", "scenes", "--set", "scenes=20", "--workers", "0", "--device", "cpu"]
    code, out, _ = run(capsys, *command, "--per-class")
    assert code == 0
    assert "mIoU" in out
    assert "crescent" in out
    code, out, _ = run(capsys, *command, "--json", "--flip", "--scales", "1", "1.5", "--out", str(tmp_path))
    document = json.loads(out)
    assert document["task"] == "segmentation"
    assert document["inference"] == {"window": 0, "stride": 0, "scales": [1.0, 1.5], "flip": True}
    assert list(document["per_class"])[:3] == ["backdrop", "disc", "square"]
    assert 0 <= document["miou"] <= document["aacc"] <= 100
    assert json.loads((tmp_path / "evaluation.json").read_text()) == document


def test_predict_writes_labels_overlay_and_areas(capsys, folder, tmp_path):
    small = tmp_path / "photo.png"
    Image.open(photo_paths()["cat"]).resize((75, 50)).save(small)
    out = tmp_path / "out"
    code, text, err = run(capsys, "predict", str(folder), str(small), "--out", str(out), "--device", "cpu")
    assert (code, err) == (0, "")
    assert "photo_labels.png photo_overlay.png" in text
    labels, overlay = Image.open(out / "photo_labels.png"), Image.open(out / "photo_overlay.png")
    assert labels.size == overlay.size == (75, 50)
    assert labels.mode == "P"  # values are class indices, coloured by the palette
    assert np.asarray(labels).max() < 11
    (entry,) = json.loads((out / "predictions.json").read_text())["predictions"]
    counts = np.bincount(np.asarray(labels).flatten(), minlength=11)
    assert {area["class"]: area["pixels"] for area in entry["classes"]} == {i: n for i, n in enumerate(counts) if n}
    assert sum(area["share"] for area in entry["classes"]) == pytest.approx(1, abs=1e-5)  # rounded to 1e-6 each
    assert not np.array_equal(np.asarray(overlay), np.asarray(Image.open(small).convert("RGB")))


def test_predict_uses_windows_and_skips_unreadable_images(capsys, folder, tmp_path):
    (tmp_path / "in").mkdir()
    Image.open(photo_paths()["coffee"]).resize((90, 70)).save(tmp_path / "in/good.jpg")
    (tmp_path / "in/bad.jpg").write_bytes(b"not an image")
    command = ["predict", str(folder), str(tmp_path / "in"), "--window", "64", "--json", "--device", "cpu"]
    code, out, err = run(capsys, *command)
    assert code == 0
    assert "skipped" in err
    document = json.loads(out)
    assert [entry["image"] for entry in document["predictions"]] == [str(tmp_path / "in/good.jpg")]
    assert "bad.jpg" in document["unreadable"][0]
    code, _, err = run(capsys, "predict", str(folder), str(tmp_path / "absent.jpg"))
    assert code == 1
    assert "no such file or folder" in err


@pytest.mark.parametrize("command", ["predict", "eval"])
def test_stride_without_a_window_is_refused(capsys, folder, command):
    words = {"predict": [str(photo_paths()["coffee"])], "eval": ["--data", "scenes"]}[command]
    code, out, err = run(capsys, command, str(folder), *words, "--stride", "32", "--device", "cpu")
    assert (code, out) == (2, "")
    assert err == f"saccade {command}: stride is that of a sliding window. Add window, or remove it.\n"


def test_predict_classifies(capsys, tmp_path):
    from saccade.models.card import Card, Preprocess, save_model

    model = saccade.create_model("svit_nano", num_classes=3)
    card = Card("svit_nano", 3, {}, ["ant", "bee", "cat"], Preprocess(64))
    save_model(model, tmp_path / "model.safetensors", card)
    command = ["predict", str(tmp_path / "model.safetensors"), str(photo_paths()["cat"]), "--top", "2", "--json"]
    code, out, _ = run(capsys, *command, "--device", "cpu")
    assert code == 0
    (entry,) = json.loads(out)["predictions"]
    assert len(entry["classes"]) == 2
    assert entry["classes"][0]["probability"] >= entry["classes"][1]["probability"]
    assert entry["classes"][0]["name"] in card.classes


def test_convert_writes_an_official_segmenter(capsys, tmp_path):
    torch.save(official_file(), tmp_path / "official.pth")
    target = tmp_path / "ours.safetensors"
    code, out, err = run(capsys, "convert", str(tmp_path / "official.pth"), str(target), "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert (document["model"], document["num_classes"]) == ("paca_tiny+paca", 150)
    from saccade.tasks.load import card_of, load

    model = load(target)
    card = card_of(model)
    assert (card.head, card.kwargs) == ("paca", {"clusters": [100, 100, 100, 0]})
    score = official_file()["state_dict"]["decode_head.conv_seg.weight"]
    torch.testing.assert_close(model.head.classifier.fc.weight.data, score)
