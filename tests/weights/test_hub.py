"""Checkpoints on the Hugging Face Hub through timm, without network access."""

import json

import timm
import torch
from safetensors.torch import load_file
from timm.models import save_for_hf

import saccade

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
