"""Weights on the Hugging Face Hub: our safetensors file with its card, timm's config.json, and a model card.

Tokens, proxies, mirrors (HF_ENDPOINT) and offline mode (HF_HUB_OFFLINE) are those of huggingface_hub.
"""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from timm.models import save_for_hf

from saccade.models.card import Card, read_card
from saccade.models.checkpoint import load_checkpoint
from saccade.models.registry import create_model
from saccade.weights.read import CheckpointError, read_metadata

PREFIX = "hf-hub:"
WEIGHTS, CONFIG = "model.safetensors", "config.json"


def hub_file(name: str) -> Path:
    """The weights of "hf-hub:OWNER/NAME" or "hf-hub:OWNER/NAME@REVISION"; timm's config.json is in the same folder."""
    repo, _, revision = name.removeprefix(PREFIX).partition("@")
    try:
        path = Path(hf_hub_download(repo, WEIGHTS, revision=revision or None))
    except Exception as error:  # of huggingface_hub, requests or httpx, by version
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"expected {WEIGHTS} in {name}, got {type(error).__name__}: {reason}") from error
    with suppress(EntryNotFoundError, LocalEntryNotFoundError):  # a task that timm does not have
        hf_hub_download(repo, CONFIG, revision=revision or None)
    return path


def push(path: Path, repo: str) -> str:
    """Upload a saccade file to the Hub with timm's configuration (classifiers) and a model card; return the address."""
    card, notes = read_card(path), read_metadata(path)
    api = HfApi(library_name="saccade")
    repo = api.create_repo(repo, exist_ok=True).repo_id
    with TemporaryDirectory() as folder:
        if card.task == "classification":
            model: Any = create_model(card.name, num_classes=card.num_classes, **card.kwargs)
            load_checkpoint(model, path)
            config = {"label_names": card.classes} if card.classes else {}
            save_for_hf(model, folder, config, card.kwargs, safe_serialization=True)
        shutil.copyfile(path, Path(folder) / WEIGHTS)  # with its metadata
        (Path(folder) / "README.md").write_text(model_card(card, notes, repo), encoding="utf-8")
        return str(api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Add model"))


def model_card(card: Card, notes: dict[str, str], repo: str) -> str:
    """README.md of a repository: metadata, use, origin, input."""
    label = f"{card.name}+{card.head}" if card.head else card.name
    task = {"classification": "image-classification", "segmentation": "image-segmentation"}
    header = {"library_name": "saccade", "pipeline_tag": task.get(card.task, "object-detection"), "tags": ["saccade"]}
    licence = notes.get("saccade.licence", "")
    if licence and licence != "none given":
        header["license"] = licence
    timm_line = f'\nmodel = timm.create_model("{PREFIX}{repo}", pretrained=True)  # the same' if not card.head else ""
    rows = {
        "model": label,
        "classes": card.num_classes,
        "options": json.dumps(card.kwargs | card.head_kwargs),
        "input": f"{card.preprocess.size} px, {card.preprocess.interpolation}, crop {card.preprocess.crop_pct}",
        "mean, std": f"{card.preprocess.mean}, {card.preprocess.std}",
    }
    rows |= {
        key.removeprefix("saccade."): notes[key]
        for key in ("saccade.source", "saccade.sha256", "saccade.licence", "saccade.accuracy", "saccade.note")
        if key in notes
    }
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in header.items()), "---", "", f"# {label}", ""]
    lines += ["```python", "import saccade, timm", "", f'model = saccade.load("{PREFIX}{repo}"){timm_line}', "```", ""]
    lines += ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items()), ""]
    return "\n".join(lines)
