"""A user's checkpoint to and from the Hugging Face Hub by timm's own path, as far as it goes without a network."""

import json

import timm
import torch
from safetensors.torch import load_file
from timm.models import save_for_hf

import saccade

IMAGES = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def test_what_timm_would_push_is_complete(tmp_path):
    model = saccade.create_model("svit_nano", num_classes=3)
    model.pretrained_cfg["label_names"] = ["cat", "cup", "fish"]
    save_for_hf(model, tmp_path, model_config={"label_names": ["cat", "cup", "fish"]}, safe_serialization="both")
    about = json.loads((tmp_path / "config.json").read_text())
    assert about["architecture"] == "svit_nano"
    assert about["num_classes"] == 3
    assert about["label_names"] == ["cat", "cup", "fish"]
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()
    assert (tmp_path / "pytorch_model.bin").is_file()


def test_it_comes_back_the_same(tmp_path):
    for name, options in (("paca_nano", {}), ("sparseformer_nano", {"num_tokens": 9})):
        model = saccade.create_model(name, num_classes=3, **options).eval()
        save_for_hf(model, tmp_path / name, model_args=options, safe_serialization=True)
        for create in (timm.create_model, saccade.create_model):
            back = create(f"local-dir:{tmp_path / name}", pretrained=True).eval()
            torch.testing.assert_close(back(IMAGES), model(IMAGES))
        assert timm.create_model(f"local-dir:{tmp_path / name}", pretrained=True, num_classes=8).num_classes == 8


def test_a_name_on_the_hub_reaches_timms_download(monkeypatch, tmp_path):
    """`hf-hub:` goes through timm: the files it would fetch are served from a folder here."""
    model = saccade.create_model("vt_nano", num_classes=3).eval()
    save_for_hf(model, tmp_path, safe_serialization=True)
    asked = []

    def fetch(repo_id, filename, **_):
        asked.append((repo_id, filename))
        return str(tmp_path / filename)

    monkeypatch.setattr("timm.models._hub.hf_hub_download", fetch)
    back = saccade.create_model("hf-hub:someone/vt_nano_cups", pretrained=True).eval()
    torch.testing.assert_close(back(IMAGES), model(IMAGES))
    assert {name for _, name in asked} == {"config.json", "model.safetensors"}
    assert {repo for repo, _ in asked} == {"someone/vt_nano_cups"}
