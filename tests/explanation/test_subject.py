"""Models to explain: names, checkpoints, modules."""

import numpy as np
import pytest
import torch

import saccade
from saccade.explanation.explain import explain
from saccade.explanation.subject import is_checkpoint, load_subject


def test_checkpoint_is_loaded_and_named(cat, tmp_path):
    torch.manual_seed(3)
    model = saccade.create_model("svit_nano", num_classes=7)
    path = tmp_path / "svit_nano.safetensors"
    saccade.save_checkpoint(model, path)
    explanation = explain(cat, path, importance=())
    assert (explanation.model, explanation.weights, explanation.trained) == ("svit_nano", path.name, True)
    assert explanation[0].predictions == explain(cat, model, importance=())[0].predictions
    assert explanation[0].predictions[0][0].startswith("class ")


def test_checkpoint_metadata_gives_options_labels_and_preprocessing(tmp_path):
    model = saccade.create_model("svit_nano", num_classes=3, super_token=(2, 2, 1, 1))
    metadata = {
        "saccade.kwargs": '{"super_token": [2, 2, 1, 1]}',
        "saccade.classes": '["cat", "dog", "cup"]',
        "saccade.preprocess": '{"size": 96, "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}',
    }
    saccade.save_checkpoint(model, tmp_path / "mine.safetensors", metadata)
    image = explain(np.zeros((50, 50, 3), np.uint8), tmp_path / "mine.safetensors", importance=())[0]
    assert {name for name, _ in image.predictions} == {"cat", "dog", "cup"}
    assert image.steps[0]["grid"] == [24, 24]
    assert image.steps[0]["tokens"] == 144


def test_loaded_model_is_explained_as_its_file(tmp_path):
    """`saccade.load` keeps class names and preprocessing in the model's card."""
    metadata = {"saccade.classes": '["cat", "dog", "cup"]', "saccade.preprocess": '{"size": 96, "crop_pct": 0.8}'}
    path = tmp_path / "mine.safetensors"
    saccade.save_checkpoint(saccade.create_model("svit_nano", num_classes=3), path, metadata)
    subject, expected = load_subject(saccade.load(path)), load_subject(path)
    assert (subject.labels, subject.size, subject.crop_pct) == (["cat", "dog", "cup"], 96, 0.8)
    assert (subject.labels, subject.size, subject.crop_pct) == (expected.labels, expected.size, expected.crop_pct)


def test_name_without_weights_is_initialised_from_the_seed():
    first, second, other = (load_subject("svit_nano", seed=seed) for seed in (5, 5, 6))
    assert (first.weights, first.trained) == ("random initialisation, seed 5", False)
    pairs = zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    pairs = zip(first.model.parameters(), other.model.parameters(), strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)


def test_subject_prepares_images_for_its_model():
    subject = load_subject(saccade.create_model("svit_nano").double())
    images = torch.rand(2, 3, 8, 8)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (subject.mean, subject.std))
    torch.testing.assert_close(subject.prepare(images), ((images - mean) / std).double())


def test_subject_averages_the_colours_for_one_channel():
    subject = load_subject(saccade.create_model("svit_nano", in_chans=1))
    assert len(subject.mean) == len(subject.std) == 1
    assert subject.prepare(torch.rand(2, 3, 8, 8)).shape == (2, 1, 8, 8)


def test_video_model_has_frames_and_stride():
    subject = load_subject("video_sparseformer_nano")
    assert (subject.frames, subject.stride) == (8, 4)
    assert load_subject("sparseformer_nano").frames == 0


def test_labels_of_1000_classes_are_imagenets():
    subject = load_subject(saccade.create_model("svit_nano", num_classes=1000))
    assert [subject.label(i) for i in (0, 999)] == ["tench", "toilet tissue"]
    assert load_subject(saccade.create_model("svit_nano", num_classes=3)).label(2) == "class 2"


def test_run_folder_is_a_checkpoint(tmp_path):
    assert not is_checkpoint(tmp_path)
    (tmp_path / "last.safetensors").touch()
    assert is_checkpoint(tmp_path)
    assert is_checkpoint(tmp_path / "missing.pth")
    assert not is_checkpoint(tmp_path / "svit_nano")


def test_unsupported_models_are_refused(tmp_path):
    torch.save({"fc.weight": torch.zeros(3, 3)}, tmp_path / "other.pth")
    (tmp_path / "broken.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="no registered model has the tensors of this checkpoint"):
        load_subject(tmp_path / "other.pth")
    with pytest.raises(ValueError, match="no such checkpoint"):
        load_subject(tmp_path / "missing.safetensors")
    with pytest.raises(ValueError, match="damaged or incomplete"):
        load_subject(tmp_path / "broken.safetensors")
    with pytest.raises(ValueError, match="Did you mean 'svit_nano'"):
        load_subject("svit_nan")
    with pytest.raises(ValueError, match="expected a model that groups pixels into tokens, got Conv2d"):
        load_subject(torch.nn.Conv2d(3, 4, 3))
    with pytest.raises(ValueError, match=r"expected a model with 3 input channels or 1, got svit_nano.* with 5"):
        load_subject(saccade.create_model("svit_nano", in_chans=5))


def test_detector_is_explained_at_its_own_size():
    options = {"min_size": 96, "max_size": 160, "width": 16}
    subject = load_subject(saccade.create_detector("svit_nano", "mask_rcnn", 3, **options))
    assert (subject.size, subject.longest) == (96, 160)
