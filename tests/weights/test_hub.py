"""Checkpoints on the Hugging Face Hub through timm, without network access."""

import json
import shutil
from types import SimpleNamespace

import pytest
import timm
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file
from timm.models import save_for_hf

import saccade
from saccade.cli import main
from saccade.models.card import Card, Preprocess, save_model
from saccade.weights.hub import push
from saccade.weights.read import CheckpointError

IMAGES = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def test_saved_hub_files_are_complete(tmp_path):
    model = saccade.create_model("svit_nano", num_classes=3)
    model.pretrained_cfg["label_names"] = ["cat", "cup", "fish"]
    save_for_hf(model, tmp_path, model_config={"label_names": ["cat", "cup", "fish"]}, safe_serialization="both")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architecture"] == "svit_nano"
    assert config["num_classes"] == 3
    assert config["label_names"] == ["cat", "cup", "fish"]
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()
    assert (tmp_path / "pytorch_model.bin").is_file()


def test_saved_model_loads_with_equal_outputs(tmp_path):
    for name, options in (("paca_nano", {}), ("sparseformer_nano", {"num_tokens": 9})):
        model = saccade.create_model(name, num_classes=3, **options).eval()
        save_for_hf(model, tmp_path / name, model_args=options, safe_serialization=True)
        for create in (timm.create_model, saccade.create_model):
            loaded = create(f"local-dir:{tmp_path / name}", pretrained=True).eval()
            torch.testing.assert_close(loaded(IMAGES), model(IMAGES))
        assert timm.create_model(f"local-dir:{tmp_path / name}", pretrained=True, num_classes=8).num_classes == 8


def test_hub_name_uses_the_download_of_timm(monkeypatch, tmp_path):
    """`hf-hub:` names go through timm; its download function is replaced by a local folder."""
    model = saccade.create_model("vt_nano", num_classes=3).eval()
    save_for_hf(model, tmp_path, safe_serialization=True)
    requests = []

    def fetch(repo_id, filename, **_):
        requests.append((repo_id, filename))
        return str(tmp_path / filename)

    monkeypatch.setattr("timm.models._hub.hf_hub_download", fetch)
    loaded = saccade.create_model("hf-hub:someone/vt_nano_cups", pretrained=True).eval()
    torch.testing.assert_close(loaded(IMAGES), model(IMAGES))
    assert {name for _, name in requests} == {"config.json", "model.safetensors"}
    assert {repo for repo, _ in requests} == {"someone/vt_nano_cups"}


class FakeHub:
    """HfApi and hf_hub_download on a local folder."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, **_):
        return self

    def create_repo(self, repo_id, exist_ok):
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(self, repo_id, folder_path, commit_message):
        shutil.copytree(folder_path, self.folder / repo_id)
        return f"https://huggingface.co/{repo_id}"

    def download(self, repo_id, filename, revision=None, **_):
        path = self.folder / repo_id / filename
        if not path.is_file():
            raise LocalEntryNotFoundError(f"no {filename}\nin {repo_id}")
        return str(path)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    hub = FakeHub(tmp_path / "hub")
    monkeypatch.setattr("saccade.weights.hub.HfApi", hub)
    monkeypatch.setattr("saccade.weights.hub.hf_hub_download", hub.download)
    monkeypatch.setattr("timm.models._hub.hf_hub_download", hub.download)
    return hub


def test_pushed_classifier_loads_through_saccade_and_timm(hub, tmp_path, capsys):
    model = saccade.create_model("sparseformer_nano", num_classes=3, num_tokens=9).eval()
    card = Card("sparseformer_nano", 3, {"num_tokens": 9}, ["cat", "cup", "fish"], Preprocess(64, crop_pct=0.8))
    save_model(model, tmp_path / "own.safetensors", card, source="https://example.org/a.pth", licence="mit")
    arguments = ["convert", str(tmp_path / "own.safetensors"), str(tmp_path / "out.safetensors"), "--push", "you/cups"]
    assert main(arguments) == 0
    assert "pushed to https://huggingface.co/you/cups" in capsys.readouterr().out
    opened = saccade.load("hf-hub:you/cups")
    assert opened.card == card
    torch.testing.assert_close(opened(IMAGES), model(IMAGES))
    torch.testing.assert_close(timm.create_model("hf-hub:you/cups", pretrained=True).eval()(IMAGES), model(IMAGES))
    readme = (hub.folder / "you/cups/README.md").read_text()
    assert readme.startswith("---\n")
    assert 'license: "mit"' in readme
    assert 'saccade.load("hf-hub:you/cups")' in readme
    assert "| source | https://example.org/a.pth |" in readme


def test_pushed_segmenter_loads(hub, tmp_path):
    model = saccade.create_segmenter("svit_nano", "fpn", 4, head_kwargs={"dim": 32, "branch_dim": 16}).eval()
    card = Card("svit_nano", 4, {}, [], Preprocess(64), "segmentation", "fpn", {"dim": 32, "branch_dim": 16})
    save_model(model, tmp_path / "own.safetensors", card)
    push(tmp_path / "own.safetensors", "you/streets")
    opened = saccade.load("hf-hub:you/streets@main")
    assert opened.card == card
    torch.testing.assert_close(opened(IMAGES), model(IMAGES))
    assert "image-segmentation" in (hub.folder / "you/streets/README.md").read_text()


def test_repository_written_by_timm_has_a_card(hub):
    model = saccade.create_model("vt_nano", num_classes=3).eval()
    config = {"label_names": ["a", "b", "c"], "model_args": {"num_classes": 3}}  # as timm 1.0.31 writes it
    save_for_hf(model, hub.folder / "them/vt", config, safe_serialization=True)
    opened = saccade.load("hf-hub:them/vt")
    card = opened.card
    assert (card.name, card.classes, card.preprocess.size) == ("vt_nano", ["a", "b", "c"], 64)
    torch.testing.assert_close(opened(IMAGES), model(IMAGES))


def test_absent_repository_is_one_line(hub):
    with pytest.raises(CheckpointError, match=r"expected model.safetensors in hf-hub:a/b, got .*: no model"):
        saccade.load("hf-hub:a/b")
