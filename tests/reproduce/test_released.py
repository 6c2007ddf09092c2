"""Released weights from a local server, evaluated on a small folder of images against the printed accuracy."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

import saccade
from saccade.cli import main
from saccade.models.card import Card, preprocess_of
from saccade.models.official import sparseformer
from saccade.reproduce import claim as declared
from saccade.reproduce.claim import ClaimError, Released
from saccade.reproduce.released import find_release
from saccade.tasks import released as tasks_released
from saccade.weights import releases
from saccade.weights.releases import SPARSEFORMER, Release
from tests.parity import kit
from tests.weights.server import file_server

CLASSES = 3
FILES = [  # under the authors' names, small
    Release("sparseformer_nano", tag, f"{SPARSEFORMER}{tag}.pth", 14, accuracy)
    for tag, accuracy in (("first", "50.0 top-1"), ("second", "12.3 top-1"))
]


@pytest.fixture
def server(monkeypatch, tmp_path):
    for name in ("HF_HUB_OFFLINE", "SACCADE_OFFLINE", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SACCADE_HOME", str(tmp_path / "home"))
    with file_server() as server:
        monkeypatch.setenv("SACCADE_MIRROR", f"{server.address}/mirror/")
        yield server


def official_file(seed: int, favourite: int) -> bytes:
    """A SparseFormer nano under the authors' names that predicts one class for every image."""
    torch.manual_seed(seed)
    model = saccade.create_model("sparseformer_nano", num_classes=CLASSES)
    with torch.no_grad():
        model.get_classifier().bias[favourite] = 100.0
    names = kit.official_names("sparseformer_v1_tiny", lambda weights: sparseformer.convert(weights, model))
    buffer = io.BytesIO()
    torch.save({"state_dict": {names[ours]: value for ours, value in model.state_dict().items()}}, buffer)
    return buffer.getvalue()


def build_small(release: Release, state_dict) -> tuple[torch.nn.Module, Card]:
    """As for a released classifier, with few classes."""
    model = saccade.create_model(release.model, num_classes=CLASSES)
    return model, Card(release.model, CLASSES, {}, [], preprocess_of(model))


@pytest.fixture
def images(tmp_path):
    """8 validation images: 4 of class a, 3 of b, 1 of c."""
    rng = np.random.default_rng(0)
    for label, count in (("val/a", 4), ("val/b", 3), ("val/c", 1), ("train/a", 1), ("train/b", 1), ("train/c", 1)):
        for number in range(count):
            file = tmp_path / "imagenet" / label / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (70, 80, 3), dtype=np.uint8)).save(file)
    return tmp_path / "imagenet"


def test_printed_and_measured_accuracy(server, images, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(releases, "RELEASES", tuple(FILES))
    monkeypatch.setattr(tasks_released, "build_classifier", build_small)
    rows = {"row one": FILES[0].name, "row two": FILES[1].name}
    entry = Released("nano-models", "SparseFormer", "Table 2", "the released models have the printed top-1", rows)
    monkeypatch.setattr(declared, "load_released", lambda: {entry.name: entry})
    for number, release in enumerate(FILES):
        server.files[release.url.rpartition("/")[2]] = official_file(number, number)
    command = ["reproduce", "nano-models", "--data", str(images), "--device", "cpu", "--out", str(tmp_path / "out")]
    assert main([*command, "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)
    measured = [(row["label"], row["printed"], row["top1"], row["difference"]) for row in document["rows"]]
    assert measured == [("row one", 50.0, 50.0, 0.0), ("row two", 12.3, 37.5, 25.2)]
    assert document["rows"][0]["count"] == 8
    assert json.loads((tmp_path / "out/released/nano-models.json").read_text()) == document
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "top-1 on 8 images of imagenet" in text
    assert "+25.20" in text


def test_flags_of_training_are_refused(images, capsys):
    for flags, message in (
        (["--set", "epochs=1"], "--set is for claims that train"),
        (["--budget", "3"], "--budget is for claims that train"),
        (["--seeds", "5"], "--seeds is for claims that train"),
    ):
        assert main(["reproduce", "paca-clusters", "--data", str(images), *flags]) == 2
        assert message in capsys.readouterr().err
    assert main(["reproduce", "paca-clusters"]) == 2
    assert "paca-clusters needs one --data PATH of ImageNet, got 0" in capsys.readouterr().err
    assert main(["reproduce", "paca-clusters", "svit-cpe", "--data", str(images)]) == 2
    assert "Give it without claims that train" in capsys.readouterr().err


def test_weights_without_a_printed_accuracy_are_refused():
    with pytest.raises(ClaimError, match="expected released weights with a printed top-1"):
        find_release("sparseformer_btsp_augreg_base.in1k")
