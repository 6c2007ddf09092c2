"""Checkpoints: recognised, converted, strict; a bad file is one clear error and leaves the model untouched."""

import argparse
import os
import pickle

import pytest
import torch

import saccade
from saccade.models.checkpoint import identify
from saccade.weights.read import CheckpointError, read_metadata
from tests.parity import kit


class Code:
    """A pickle that would run a command when loaded the careless way."""

    def __reduce__(self):
        return os.system, ("echo this must never run > executed",)


@pytest.fixture
def nano():
    torch.manual_seed(0)
    return saccade.create_model("svit_nano", num_classes=5).eval()


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_untouched(model, before):
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_checkpoint_round_trip_has_its_notes(nano, tmp_path):
    path = tmp_path / "nano.safetensors"
    saccade.save_checkpoint(nano, path, {"note": "hello"})
    other = saccade.create_model("svit_nano", num_classes=5)
    report = saccade.load_checkpoint(other, path)
    assert_untouched(other, state(nano))
    assert (report.source, report.loaded, report.new, report.ignored) == ("saccade", len(nano.state_dict()), {}, ())
    assert read_metadata(path)["saccade.model"] == "svit_nano"
    assert read_metadata(path)["note"] == "hello"
    assert os.listdir(tmp_path) == ["nano.safetensors"]  # the temporary file is gone


@pytest.mark.parametrize(
    ("wrapper", "prefix"),
    [(None, ""), ("model", ""), ("state_dict", "module."), ("model_ema", ""), ("state_dict_ema", "module.")],
)
def test_authors_files_are_recognised_in_any_wrapper(wrapper, prefix, tmp_path):
    official = {prefix + name: value for name, value in kit.weights("stvit_small").items()}
    checkpoint = official if wrapper is None else {wrapper: official, "epoch": 3, "args": argparse.Namespace(lr=0.1)}
    torch.save(checkpoint, tmp_path / "official.pth")
    model = saccade.create_model("svit_small")
    report = saccade.load_checkpoint(model, tmp_path / "official.pth")
    assert report.source == "svit (official)"
    expected = saccade.convert_official(kit.weights("stvit_small"), "svit_small")
    assert_untouched(model, expected)


def test_conversion_is_pure():
    official = kit.weights("stvit_small")
    before = {name: value.clone() for name, value in official.items()}
    saccade.convert_official(official, "svit_small")
    assert all(torch.equal(value, before[name]) for name, value in official.items())


def test_detector_backbone_loads_into_features_only():
    official = {f"backbone.{name}": value for name, value in kit.weights("stvit_small").items()}
    official |= {"roi_head.bbox_head.fc_cls.weight": torch.zeros(81, 1024)}
    model = saccade.create_model("svit_small", features_only=True)
    report = saccade.load_checkpoint(model, official)
    assert any(name.startswith("head.fc") for name in report.ignored)
    expected = saccade.create_model("svit_small")
    saccade.load_checkpoint(expected, kit.weights("stvit_small"))
    assert_untouched(model.model, expected.state_dict())


def test_model_without_classifier_ignores_the_classifier_of_the_file(nano):
    headless = saccade.create_model("svit_nano", num_classes=0)
    report = saccade.load_checkpoint(headless, nano.state_dict())
    assert report.ignored == ("head.fc.weight", "head.fc.bias")


def test_missing_tensors_raise_unless_allowed(nano):
    partial = {name: value for name, value in nano.state_dict().items() if not name.startswith("head.")}
    with pytest.raises(CheckpointError, match=r"lacks head\.fc\.weight, head\.fc\.bias of svit_nano"):
        saccade.load_checkpoint(nano, partial)
    report = saccade.load_checkpoint(nano, partial, strict=False)
    assert list(report.new) == ["head.fc.weight", "head.fc.bias"]
    assert "2 not loaded" in str(report)


def test_identify_names_model_and_classes(nano):
    assert identify(nano.state_dict()) == ("svit_nano", 5)
    assert identify(kit.weights("stvit_small")) == ("svit_small", 1000)


def classes(tmp_path):
    path = tmp_path / "seven.safetensors"
    saccade.save_checkpoint(saccade.create_model("svit_nano", num_classes=7), path)
    return path


def truncated(tmp_path):
    path = tmp_path / "cut.pth"
    torch.save(saccade.create_model("svit_nano", num_classes=5).state_dict(), path)
    path.write_bytes(path.read_bytes()[:5000])
    return path


def truncated_safetensors(tmp_path):
    path = classes(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    return path


def unknown(tmp_path):
    path = tmp_path / "unknown.pth"
    torch.save({"conv1.weight": torch.zeros(3), "bn.bias": torch.zeros(3)}, path)
    return path


def code(tmp_path):
    path = tmp_path / "code.pth"
    torch.save({"state_dict": Code()}, path)
    return path


def plain_pickle(tmp_path):
    path = tmp_path / "plain.pth"
    path.write_bytes(pickle.dumps(Code()))
    return path


def text(tmp_path):
    path = tmp_path / "page.pth"
    path.write_text("<html>404 not found</html>")
    return path


def nested_nothing(tmp_path):
    path = tmp_path / "nothing.pth"
    torch.save({"epoch": 3}, path)
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (classes, r"has 7 classes, the model 5\. Create the model with num_classes=7"),
        (truncated, "damaged or incomplete"),
        (truncated_safetensors, "damaged or incomplete"),
        (unknown, "expected a checkpoint of svit_nano or of "),
        (code, "could run code"),
        (plain_pickle, "could run code"),
        (text, "not a checkpoint: expected safetensors"),
        (nested_nothing, "no weights found"),
        (lambda folder: folder / "absent.pth", "no such checkpoint"),
    ],
)
def test_bad_file_raises_and_model_is_unchanged(nano, tmp_path, monkeypatch, make, message):
    monkeypatch.chdir(tmp_path)
    before = state(nano)
    with pytest.raises(CheckpointError, match=message):
        saccade.load_checkpoint(nano, make(tmp_path))
    assert_untouched(nano, before)
    assert not (tmp_path / "executed").exists()


def test_checkpoint_of_another_variant_raises_and_model_is_unchanged(nano):
    with pytest.raises(CheckpointError, match=r"for svit_nano, got \(32, 3, 3, 3\)\. Use the same size and options"):
        saccade.load_checkpoint(nano, saccade.create_model("svit_small").state_dict())
    before = state(nano)
    with pytest.raises(CheckpointError, match=r"expected official weights of svit_nano, got .* another size"):
        saccade.load_checkpoint(nano, kit.weights("stvit_small"))
    assert_untouched(nano, before)


def test_failed_write_leaves_the_old_file(nano, tmp_path, monkeypatch):
    path = tmp_path / "nano.safetensors"
    saccade.save_checkpoint(nano, path)
    before = path.read_bytes()

    def full_disk(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("saccade.models.checkpoint.save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        saccade.save_checkpoint(nano, path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["nano.safetensors"]


def test_unknown_model_suggests_the_nearest_name():
    with pytest.raises(ValueError, match="Did you mean 'svit_small'"):
        saccade.create_model("svit_smal")
