"""Open checkpoints of every task."""

import pytest
import torch
from timm.data import resolve_data_config

import saccade
from saccade.models.card import Card, Preprocess, save_model
from saccade.tasks.load import card_of, identify_segmenter, load, read_task_card
from saccade.tasks.segmentation import Segmenter
from saccade.tasks.sparse_detector import SparseDetector
from saccade.weights.read import CheckpointError
from tests.tasks.test_segmentation_checkpoints import official_file

PREPROCESS = Preprocess(64)


def save(model, path, **fields):
    card = Card(**({"num_classes": 3, "kwargs": {}, "classes": [], "preprocess": PREPROCESS} | fields))
    save_model(model, path, card)
    return card


def assert_same_weights(opened, saved):
    assert not opened.training
    torch.testing.assert_close(dict(opened.state_dict()), dict(saved.state_dict()))


def test_classifier_is_opened(tmp_path):
    model = saccade.create_model("vt_nano", num_classes=3)
    card = save(model, tmp_path / "m.safetensors", name="vt_nano")
    opened = load(tmp_path / "m.safetensors")
    read = card_of(opened)
    assert read == card
    assert_same_weights(opened, model)


def test_segmenter_is_opened_with_its_head_options(tmp_path):
    options = {"dim": 8, "branch_dim": 8}
    model = saccade.create_segmenter("svit_nano", "fpn", 3, head_kwargs=options)
    card = save(
        model, tmp_path / "best.safetensors", name="svit_nano", task="segmentation", head="fpn", head_kwargs=options
    )
    opened = load(tmp_path)  # the folder of a run: its best weights
    read = card_of(opened)
    assert isinstance(opened, Segmenter)
    assert read == card
    assert_same_weights(opened, model)


def test_detector_is_opened_with_its_head_options(tmp_path):
    options = {"num_tokens": 9, "detect_tokens": 4, "min_size": 64, "max_size": 64}
    model = saccade.create_detector("sparseformer_nano", "sparse", 3, **options)
    fields = dict(name="sparseformer_nano", task="detection", head="sparse", head_kwargs=options)
    save(model, tmp_path / "m.safetensors", **fields)
    opened = load(tmp_path / "m.safetensors")
    card = card_of(opened)
    assert isinstance(opened, SparseDetector)
    assert (card.task, card.head, opened.head.count) == ("detection", "sparse", 4)
    assert_same_weights(opened, model)


def test_unknown_task_is_refused(tmp_path):
    model = saccade.create_model("vt_nano", num_classes=3)
    save(model, tmp_path / "m.safetensors", name="vt_nano", task="captioning")
    with pytest.raises(CheckpointError, match=r"expected a checkpoint for .*, got 'captioning'"):
        load(tmp_path / "m.safetensors")


def test_authors_segmenter_is_identified_by_its_tensors(tmp_path):
    torch.save(official_file(), tmp_path / "paca.pth")
    card = read_task_card(tmp_path / "paca.pth")
    assert (card.name, card.task, card.head, card.num_classes) == ("paca_tiny", "segmentation", "paca", 150)
    assert card.kwargs == {"clusters": (100, 100, 100, 0)}  # the released file; the paper's segmenters have 200


def test_segmenter_of_no_registered_backbone_is_refused():
    with pytest.raises(CheckpointError, match=r"expected a segmentation head .* \(decode_head\.\*\), got none"):
        identify_segmenter({"backbone.weight": torch.zeros(1)})
    changed = dict(official_file()["state_dict"])
    changed["backbone.unknown"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match="no registered backbone has the tensors"):
        identify_segmenter(changed)


def test_card_says_whether_a_model_is_multi_label(tmp_path):
    model = saccade.create_model("vt_nano", num_classes=3)
    card = Card("vt_nano", 3, {}, ["a", "b", "c"], Preprocess(64), multi_label=True)
    save_model(model, tmp_path / "model.safetensors", card)
    assert card_of(load(tmp_path / "model.safetensors")) == card
    assert repr(card) == "Card(vt_nano: classification, 3 labels, 64 px)"


def test_timm_reads_the_preprocessing_of_a_loaded_model(tmp_path):
    preprocess = Preprocess(96, mean=(0.4, 0.5, 0.6), crop_pct=0.95, interpolation="bilinear")
    model = saccade.create_model("svit_nano", num_classes=3)
    save(model, tmp_path / "m.safetensors", name="svit_nano", preprocess=preprocess, classes=["a", "b", "c"])
    loaded = load(tmp_path / "m.safetensors")
    config = resolve_data_config({}, model=loaded)
    assert config["input_size"] == (3, 96, 96)
    assert (config["mean"], config["crop_pct"], config["interpolation"]) == ((0.4, 0.5, 0.6), 0.95, "bilinear")
    assert (loaded.pretrained_cfg["num_classes"], loaded.pretrained_cfg["label_names"]) == (3, ("a", "b", "c"))
